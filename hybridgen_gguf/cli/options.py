"""Every flag, once: name, alias, environment variables, panel, help. Commands take groups of flags as dataclasses.

llama.cpp's flags keep llama.cpp's names; its environment variables are read after our own. Knows no engine, no model.
Invariant: a flag defined here appears in `--help`, in docs/cli.md and in the configuration file under the same name.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import MISSING, dataclass, fields
from typing import Annotated, Any, TypeVar, get_type_hints

import typer

Command = TypeVar("Command", bound=Callable[..., Any])

MODEL, PLACE, WRITE, SAMPLE, OUTPUT = "Model", "Placement and memory", "Prompt and answer", "Sampling", "Output"


def _flag(panel: str, text: str, *names: str, llama: str = "", metavar: str | None = None) -> Any:
    """An option whose environment variables are HGGUF_<LONG NAME> and then llama.cpp's `llama`."""
    long = max((name for name in names if "/" not in name), key=len)
    own = "HGGUF_" + long.lstrip("-").upper().replace("-", "_")
    variables = [own, f"LLAMA_ARG_{llama}"] if llama else [own]
    return typer.Option(*names, help=text, rich_help_panel=panel, envvar=variables, show_envvar=False, metavar=metavar)


def _plain(panel: str, text: str, *names: str, metavar: str | None = None) -> Any:
    """An option without environment variables: what one call asks for."""
    return typer.Option(*names, help=text, rich_help_panel=panel, metavar=metavar)


ModelArgument = Annotated[
    str | None,
    typer.Argument(
        metavar="MODEL",
        help="A GGUF file, an alias (see `hgguf models`), or user/repo[:QUANT] on the Hub.",
        show_default=False,
    ),
]
ModelFlag = Annotated[
    str | None, _flag(MODEL, "The model, as a flag.", "-m", "--model", llama="MODEL", metavar="MODEL")
]
JsonFlag = Annotated[bool, _plain(OUTPUT, "Print one JSON document on stdout.", "--json")]
ExplainFlag = Annotated[bool, _plain(OUTPUT, "Say for every number why it is what it is.", "--explain")]


@dataclass(frozen=True)
class PlaceFlags:
    """What the user allows or fixes; what is left unset, the planner chooses."""

    ctx_size: Annotated[int | None, _flag(PLACE, "Context in tokens.", "-c", "--ctx-size", llama="CTX_SIZE")] = None
    n_gpu_layers: Annotated[
        str | None,
        _flag(
            PLACE,
            "Layers on the GPU.",
            "-ngl",
            "--n-gpu-layers",
            "--gpu-layers",
            llama="N_GPU_LAYERS",
            metavar="N|auto|all",
        ),
    ] = None
    vram: Annotated[
        str | None,
        _flag(PLACE, "Bytes that may be taken of each GPU, such as 6GiB; 0: the CPU alone.", "--vram", metavar="SIZE"),
    ] = None
    ram: Annotated[str | None, _flag(PLACE, "Bytes of host memory that may be taken.", "--ram", metavar="SIZE")] = None
    threads: Annotated[int | None, _flag(PLACE, "Threads for writing.", "-t", "--threads", llama="THREADS")] = None
    threads_batch: Annotated[int | None, _flag(PLACE, "Threads for reading prompts.", "-tb", "--threads-batch")] = None
    adapt_threads: Annotated[
        bool, _flag(PLACE, "Follow the cores that others leave; last bits of a run then vary.", "--adapt-threads")
    ] = False
    batch_size: Annotated[
        int | None, _flag(PLACE, "Tokens handed over at once.", "-b", "--batch-size", llama="BATCH")
    ] = None
    ubatch_size: Annotated[
        int | None, _flag(PLACE, "Tokens computed at once.", "-ub", "--ubatch-size", llama="UBATCH")
    ] = None
    cache_type_k: Annotated[
        str, _flag(PLACE, "Type of the K cache.", "-ctk", "--cache-type-k", llama="CACHE_TYPE_K")
    ] = "f16"
    cache_type_v: Annotated[
        str, _flag(PLACE, "Type of the V cache.", "-ctv", "--cache-type-v", llama="CACHE_TYPE_V")
    ] = "f16"
    flash_attn: Annotated[
        str, _flag(PLACE, "Flash attention.", "-fa", "--flash-attn", llama="FLASH_ATTN", metavar="on|off|auto")
    ] = "auto"
    no_kv_offload: Annotated[bool, _flag(PLACE, "Keep the KV cache in host memory.", "-nkvo", "--no-kv-offload")] = (
        False
    )
    kv_vram: Annotated[
        str | None,
        _flag(
            PLACE,
            "KV on the GPU; the rest lies in RAM, where the CPU attends to it. [default: what is fastest]",
            "--kv-vram",
            metavar="SIZE",
        ),
    ] = None
    kv_ram_type: Annotated[
        str | None, _flag(PLACE, "Type of the KV in RAM.", "--kv-ram-type", metavar="f16|q8_0|q4_0")
    ] = None
    kv_policy: Annotated[
        str,
        _flag(
            PLACE,
            "KV that stays on the GPU: the first tokens, or the most recent ones.",
            "--kv-policy",
            metavar="fill|recent",
        ),
    ] = "fill"
    adapt_kv: Annotated[
        bool,
        _flag(
            PLACE,
            "Measure while running whether CPU or GPU attends to KV in RAM; last bits of a run then vary.",
            "--adapt-kv",
        ),
    ] = False
    override_tensor: Annotated[
        list[str] | None,
        _flag(
            PLACE,
            "Buffer type for tensors whose name matches.",
            "-ot",
            "--override-tensor",
            llama="OVERRIDE_TENSOR",
            metavar="PATTERN=TYPE,...",
        ),
    ] = None
    n_cpu_moe: Annotated[
        int | None,
        _flag(PLACE, "Keep the experts of the first N layers on the CPU.", "-ncmoe", "--n-cpu-moe", llama="N_CPU_MOE"),
    ] = None
    device: Annotated[
        str | None, _flag(PLACE, "Devices to use, separated by commas.", "-dev", "--device", llama="DEVICE")
    ] = None
    split_mode: Annotated[
        str,
        _flag(
            PLACE,
            "How several GPUs share the model.",
            "-sm",
            "--split-mode",
            llama="SPLIT_MODE",
            metavar="none|layer|row",
        ),
    ] = "layer"
    tensor_split: Annotated[
        str | None, _flag(PLACE, "Share of each GPU, such as 3,1.", "-ts", "--tensor-split", llama="TENSOR_SPLIT")
    ] = None
    main_gpu: Annotated[int, _flag(PLACE, "The GPU for -sm none.", "-mg", "--main-gpu", llama="MAIN_GPU")] = 0
    mlock: Annotated[bool, _flag(PLACE, "Lock the weights in memory.", "--mlock")] = False
    no_mmap: Annotated[bool, _flag(PLACE, "Read the weights instead of mapping the file.", "--no-mmap")] = False
    numa: Annotated[
        str | None,
        _flag(PLACE, "How threads meet NUMA nodes.", "--numa", llama="NUMA", metavar="distribute|isolate|numactl"),
    ] = None
    rpc: Annotated[
        str | None, _flag(PLACE, "RPC servers, separated by commas.", "--rpc", llama="RPC", metavar="HOST:PORT,...")
    ] = None
    plan: Annotated[
        str | None, _plain(PLACE, "Use the plan in this file (made by `hgguf plan --json`).", "--plan", metavar="FILE")
    ] = None
    goal: Annotated[str, _flag(PLACE, "What the plan is to be fast at.", "--goal", metavar="decode|prompt|mixed")] = (
        "mixed"
    )
    depth: Annotated[
        int | None,
        _flag(PLACE, "Tokens expected in the context; none: what prompt and answer need, or half of it.", "--depth"),
    ] = None
    no_tuned: Annotated[bool, _flag(PLACE, "Ignore what `hgguf tune` found.", "--no-tuned")] = False
    strict: Annotated[
        bool, _flag(PLACE, "Settings without an effect, such as -ot that matches no tensor, are an error.", "--strict")
    ] = False


@dataclass(frozen=True)
class PromptFlags:
    """What to ask and when to stop."""

    prompt: Annotated[str | None, _plain(WRITE, "The prompt; - reads standard input.", "-p", "--prompt")] = None
    file: Annotated[str | None, _plain(WRITE, "Read the prompt from a UTF-8 file.", "-f", "--file", metavar="FILE")] = (
        None
    )
    system: Annotated[str | None, _plain(WRITE, "The system message.", "-sys", "--system-prompt")] = None
    raw: Annotated[bool, _plain(WRITE, "Continue the text as it is, without the chat template.", "--raw")] = False
    chat_template: Annotated[
        str | None,
        _flag(WRITE, "A built-in template's name, Jinja text, or a file.", "--chat-template", llama="CHAT_TEMPLATE"),
    ] = None
    jinja: Annotated[
        bool, _flag(WRITE, "Accepted for llama.cpp's sake: templates are always Jinja.", "--jinja", llama="JINJA")
    ] = True
    predict: Annotated[
        int,
        _flag(
            WRITE,
            "Most tokens to write; -1: until the model ends or the context is full.",
            "-n",
            "--predict",
            "--n-predict",
            llama="N_PREDICT",
        ),
    ] = -1
    stop: Annotated[
        list[str] | None,
        _plain(
            WRITE,
            "End before this text (may be given several times).",
            "--stop",
            "-r",
            "--reverse-prompt",
            metavar="TEXT",
        ),
    ] = None
    ignore_eos: Annotated[bool, _plain(WRITE, "Go on after the model's end token.", "--ignore-eos")] = False


@dataclass(frozen=True)
class SampleFlags:
    """How a token is chosen. Unset flags take the alias's suggestion, then the default of SampleOptions."""

    temp: Annotated[
        float | None,
        _flag(
            SAMPLE,
            "Temperature; 0 always takes the best token. [default: 0.8]",
            "--temp",
            "--temperature",
            llama="TEMPERATURE",
        ),
    ] = None
    top_k: Annotated[
        int | None, _flag(SAMPLE, "Only the K best tokens; 0: all. [default: 40]", "--top-k", llama="TOP_K")
    ] = None
    top_p: Annotated[
        float | None,
        _flag(
            SAMPLE,
            "The best tokens that together have this probability; 1: off. [default: 0.95]",
            "--top-p",
            llama="TOP_P",
        ),
    ] = None
    min_p: Annotated[
        float | None,
        _flag(SAMPLE, "Tokens at least this likely beside the best; 0: off. [default: 0.05]", "--min-p", llama="MIN_P"),
    ] = None
    typical: Annotated[float | None, _flag(SAMPLE, "Locally typical sampling; 1: off.", "--typical", "--typical-p")] = (
        None
    )
    top_nsigma: Annotated[
        float | None,
        _flag(SAMPLE, "Tokens within N standard deviations of the best; -1: off.", "--top-nsigma", "--top-n-sigma"),
    ] = None
    xtc_probability: Annotated[
        float | None, _flag(SAMPLE, "Chance of leaving out the likeliest tokens; 0: off.", "--xtc-probability")
    ] = None
    xtc_threshold: Annotated[float | None, _flag(SAMPLE, "Tokens above this count as likely.", "--xtc-threshold")] = (
        None
    )
    repeat_penalty: Annotated[
        float | None,
        _flag(SAMPLE, "Divides the logits of repeated tokens; 1: off.", "--repeat-penalty", llama="REPEAT_PENALTY"),
    ] = None
    repeat_last_n: Annotated[
        int | None, _flag(SAMPLE, "Tokens that penalties look back on; -1: all.", "--repeat-last-n")
    ] = None
    presence_penalty: Annotated[
        float | None,
        _flag(SAMPLE, "Subtracted once from repeated tokens; 0: off.", "--presence-penalty", llama="PRESENCE_PENALTY"),
    ] = None
    frequency_penalty: Annotated[
        float | None,
        _flag(SAMPLE, "Subtracted for each repetition; 0: off.", "--frequency-penalty", llama="FREQUENCY_PENALTY"),
    ] = None
    dry_multiplier: Annotated[
        float | None, _flag(SAMPLE, "Strength of the DRY penalty on repeated sequences; 0: off.", "--dry-multiplier")
    ] = None
    dry_base: Annotated[float | None, _flag(SAMPLE, "Growth of the DRY penalty.", "--dry-base")] = None
    dry_allowed_length: Annotated[
        int | None, _flag(SAMPLE, "Repeats up to this length are free.", "--dry-allowed-length")
    ] = None
    dry_penalty_last_n: Annotated[
        int | None, _flag(SAMPLE, "Tokens that DRY looks back on; -1: all.", "--dry-penalty-last-n")
    ] = None
    dynatemp_range: Annotated[
        float | None, _flag(SAMPLE, "Range around the temperature; 0: off.", "--dynatemp-range")
    ] = None
    dynatemp_exp: Annotated[float | None, _flag(SAMPLE, "Exponent of the dynamic temperature.", "--dynatemp-exp")] = (
        None
    )
    logit_bias: Annotated[
        list[str] | None,
        _plain(
            SAMPLE,
            "Added to a token's logit, such as 15043+1 or 15043-inf.",
            "-l",
            "--logit-bias",
            metavar="ID(+|-)BIAS",
        ),
    ] = None
    samplers: Annotated[str | None, _flag(SAMPLE, "Steps in their order, separated by ';'.", "--samplers")] = None
    seed: Annotated[int | None, _flag(SAMPLE, "Seed, 0 to 4294967295; none: random, and reported.", "-s", "--seed")] = (
        None
    )
    logprobs: Annotated[
        int | None, _plain(SAMPLE, "Log-probabilities of each token and of the N likeliest (--json).", "--logprobs")
    ] = None
    draws: Annotated[
        int | None, _plain(SAMPLE, "N distinct draws for each position, without replacement (--json).", "--draws")
    ] = None


def takes(**groups: type) -> Callable[[Command], Command]:
    """Spreads dataclasses of flags over a command's parameters: typer sees a flag a field, the command gets objects."""

    def decorate(command: Command) -> Command:
        own = inspect.signature(command, eval_str=True)
        kept = [parameter for name, parameter in own.parameters.items() if name not in groups]
        spread = [parameter for group in groups.values() for parameter in _parameters(group)]

        def call(**values: Any) -> Any:
            for name, group in groups.items():
                values[name] = group(**{field.name: values.pop(field.name) for field in fields(group)})
            return command(**values)

        parameters = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in (*kept, *spread)]
        call.__name__, call.__doc__ = command.__name__, command.__doc__
        call.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]  # functions take attributes
        call.__annotations__ = {p.name: p.annotation for p in parameters}
        return call  # type: ignore[return-value]  # same command, other spelling of its parameters

    return decorate


def _parameters(group: type) -> list[inspect.Parameter]:
    hints = get_type_hints(group, include_extras=True)
    empty = inspect.Parameter.empty
    return [
        inspect.Parameter(
            field.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=empty if field.default is MISSING else field.default,
            annotation=hints[field.name],
        )
        for field in fields(group)
    ]
