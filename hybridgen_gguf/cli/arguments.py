"""What the user said → what the modules below take: flags become Limits, SampleOptions and a prompt.

Reads the prompt's file and standard input, nothing else. Invariant: everything that is wrong is a UsageError that names
the flag, before any model is opened.
"""

from __future__ import annotations

import codecs
import json
import re
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, BinaryIO

from ..errors import NotFound, UsageError
from ..named_files import open_named
from ..plan import GOALS, Limits
from ..plan.buffers import EXPERTS, tensor_pattern
from ..settings import FLASH_ATTENTION, KV_POLICIES, KV_TYPES, NUMA, SPLIT_MODES, Placement, Tiers, name_patterns
from ..units import format_size, parse_size
from .changes import adapters_of, overrides_of, rope_of
from .options import PlaceFlags, PromptFlags

_LONGEST_PROMPT = 64 << 20  # bytes: some 15 million tokens
_LONGEST_PLAN = 16 << 20  # bytes
_MOST_DEVICES = 16  # llama_max_devices()
_MOST_LAYERS = 9999  # what guides write for "all"; the engine's own limit is 512 layers
_SAMPLE_NAMES = {  # flag's field: SampleOptions' field, where they differ
    "temp": "temperature",
    "typical": "typical_p",
    "top_nsigma": "top_n_sigma",
    "dynatemp_exp": "dynatemp_exponent",
}
_RAM_TYPES = {name: KV_TYPES[name] for name in ("f16", "q8_0", "q4_0")}


def limits_of(flags: PlaceFlags, tokens_needed: int = 0) -> Limits:
    """Limits of the placement flags. `tokens_needed`: what the prompt and its answer ask for."""
    limits = Limits(
        n_ctx=flags.ctx_size or None,  # 0 is llama.cpp's spelling of "choose for me"
        tokens_needed=tokens_needed,
        n_gpu_layers=_layers(flags.n_gpu_layers),
        vram=_size("--vram", flags.vram),
        ram=_size("--ram", flags.ram),
        type_k=_one_of("-ctk", flags.cache_type_k, KV_TYPES),
        type_v=_one_of("-ctv", flags.cache_type_v, KV_TYPES),
        flash_attention=_one_of(
            "-fa", {"1": "on", "0": "off"}.get(flags.flash_attn, flags.flash_attn), FLASH_ATTENTION
        ),
        threads=_threads("-t", flags.threads),
        threads_batch=_threads("-tb", flags.threads_batch),
        n_batch=flags.batch_size,
        n_ubatch=flags.ubatch_size,
        kv_vram=_size("--kv-vram", flags.kv_vram),
        kv_ram_type=None if flags.kv_ram_type is None else _one_of("--kv-ram-type", flags.kv_ram_type, _RAM_TYPES),
        placement=Placement(
            overrides=_overrides(flags.override_tensor or (), flags.n_cpu_moe),
            devices=_devices(flags.device),
            split_mode=_one_of("-sm", flags.split_mode, SPLIT_MODES),
            main_gpu=_in_range("-mg", flags.main_gpu, 0, _MOST_DEVICES - 1),
            tensor_split=_shares(flags.tensor_split),
            use_mmap=not flags.no_mmap,
            use_mlock=flags.mlock,
            kv_offload=not flags.no_kv_offload,
        ),
        kv_policy=_one_of("--kv-policy", flags.kv_policy, KV_POLICIES),
        strict=flags.strict,
        goal=_one_of("--goal", flags.goal, GOALS),
        depth=flags.depth,
        adapters=adapters_of(flags),
        override_kv=overrides_of(flags.override_kv),
        rope=rope_of(flags),
    )
    if flags.numa is not None:
        _one_of("--numa", flags.numa, NUMA)
    return _from_plan_file(flags.plan, limits) if flags.plan is not None else limits


def endpoints_of(rpc: str | None) -> tuple[str, ...]:
    """The HOST:PORTs of --rpc."""
    return tuple(part.strip() for part in rpc.split(",") if part.strip()) if rpc else ()


def _size(flag: str, text: str | None) -> int | None:
    if text is None:
        return None
    try:
        return parse_size(text)
    except UsageError as error:
        raise UsageError(f"{flag}: {error.what}", error.hint) from None


def _threads(flag: str, count: int | None) -> int | None:
    """-1 is llama.cpp's spelling of "choose for me"."""
    return None if count is None or count == -1 else _in_range(flag, count, 1, 1024)


def _in_range(flag: str, value: int, least: int, most: int) -> int:
    if not least <= value <= most:
        raise UsageError(f"{flag} {value} is out of range", f"give {least} to {most}, or leave it out")
    return value


def _devices(text: str | None) -> tuple[str, ...] | None:
    if text is None:
        return None
    names = () if text == "none" else tuple(part.strip() for part in text.split(","))
    if not all(names) or len(names) >= _MOST_DEVICES:
        raise UsageError(f"-dev '{text}' is not a list of devices", "see `hgguf engine`, or give none")
    return names


def _layers(text: str | None) -> int | None:
    if text is None or text == "auto":
        return None
    if text == "all":
        return -1
    try:
        layers = int(text)
    except ValueError:
        raise UsageError(f"-ngl {text} is not a number of layers", "give a number, auto or all") from None
    return _in_range("-ngl", layers, -1, _MOST_LAYERS)


def _one_of(flag: str, value: str, allowed: Collection[str]) -> str:
    if value not in allowed:
        raise UsageError(f"{flag} {value} is not known", f"one of: {', '.join(allowed)}")
    return value


def _overrides(texts: Sequence[str], cpu_experts: int | None) -> tuple[tuple[str, str], ...]:
    pairs = []
    for part in ",".join(texts).split(",") if texts else ():
        pattern, equals, buffer_type = part.rpartition("=")
        if not equals or not pattern or not buffer_type or "\0" in part:
            raise UsageError(f"-ot {part} is not PATTERN=TYPE", "for example -ot 'ffn_.*_exps=CPU'")
        tensor_pattern(pattern, part)
        pairs.append((pattern, buffer_type))
    layers = _in_range("-ncmoe", cpu_experts or 0, 0, _MOST_LAYERS)
    if layers:  # one pattern: the engine compiles each pattern again for each tensor
        pairs.append((rf"blk\.({_up_to(layers - 1)}){EXPERTS}", "CPU"))
    return tuple(pairs)


def _up_to(last: int) -> str:
    """A regular expression for the numbers from 0 to `last`."""
    tens, ones = divmod(last, 10)
    if not tens:
        return f"[0-{ones}]"
    return f"({_up_to(tens - 1)})?[0-9]|{tens}[0-{ones}]"


def _shares(text: str | None) -> tuple[float, ...]:
    if text is None:
        return ()
    try:
        shares = tuple(float(part) for part in text.replace("/", ",").split(","))
    except ValueError:
        raise UsageError(f"-ts {text} is not a list of numbers", "for example -ts 3,1") from None
    if not all(0 <= share < float("inf") for share in shares) or not any(shares):
        raise UsageError(f"-ts {text} holds no shares of zero and more", "for example -ts 3,1")
    if len(shares) > _MOST_DEVICES:
        raise UsageError(f"-ts holds {len(shares)} shares, for at most {_MOST_DEVICES} devices", "for example -ts 3,1")
    return shares


def _from_plan_file(name: str, limits: Limits) -> Limits:
    """A saved plan fixes what the flags leave open."""
    try:
        with open_named(Path(name)) as file:
            data = json.loads(file.read(_LONGEST_PLAN))
        plan = data.get("plan", data)
        fixed = {
            "n_ctx": int(plan["n_ctx"]),
            "n_gpu_layers": int(plan["n_gpu_layers"]),
            "threads": int(plan["threads"]["decode"]),
            "threads_batch": int(plan["threads"]["prompt"]),
            "n_batch": int(plan["batch"]["n_batch"]),
            "n_ubatch": int(plan["batch"]["n_ubatch"]),
        }
        kinds = {name: _one_of("--plan", str(plan["kv"][name]), KV_TYPES) for name in ("type_k", "type_v")}
        kinds["flash_attention"] = _one_of("--plan", str(plan.get("flash_attention", "auto")), FLASH_ATTENTION)
        place = _place_of(plan)
    except OSError as error:
        raise NotFound(f"the plan {name} cannot be read: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
        raise UsageError(f"{name} is not a plan", "make one with `hgguf plan MODEL --json > plan.json`") from None
    limits, place["tiers"] = _merged_tiers(limits, place["tiers"])
    left_open = {key: value for key, value in fixed.items() if getattr(limits, key) is None}
    kinds = {key: value for key, value in kinds.items() if getattr(limits, key) == getattr(Limits(), key)}
    default = Placement()
    kept = {key: value for key, value in place.items() if getattr(limits.placement, key) == getattr(default, key)}
    placement = replace(limits.placement, **kept)
    return replace(limits, **left_open, **kinds, placement=placement)  # type: ignore[arg-type]  # types as above


def _place_of(plan: Mapping[str, Any]) -> dict[str, Any]:
    """What a saved plan says about placement; older ones lack some of it."""
    devices, on_host = plan.get("devices"), tuple(str(name) for name in plan.get("on_host", ()))
    ours = {(pattern, "CPU") for pattern in name_patterns(on_host)}
    overrides = _overrides([f"{pattern}={to}" for pattern, to in plan.get("overrides", ())], None)
    return {
        "overrides": tuple(pair for pair in overrides if pair not in ours),
        "on_host": on_host,
        "devices": None if devices is None else tuple(str(device) for device in devices),
        "split_mode": _one_of("--plan", str(plan.get("split_mode", "layer")), SPLIT_MODES),
        "main_gpu": _in_range("--plan: main_gpu", int(plan.get("main_gpu", 0)), 0, _MOST_DEVICES - 1),
        "tensor_split": tuple(float(share) for share in plan.get("tensor_split", ())),
        "use_mmap": bool(plan.get("use_mmap", True)),
        "use_mlock": bool(plan.get("use_mlock", False)),
        "kv_offload": bool(plan.get("kv_offload", True)),
        "tiers": _tiers_of(plan),
    }


def _tiers_of(plan: Mapping[str, Any]) -> Tiers | None:
    cells, kind, border, share = (plan.get(f"tier_{name}") for name in ("cells", "type", "cpu_tokens", "share"))
    if cells is None:
        return None
    return Tiers(
        cells=_in_range("--plan: tier_cells", int(cells), 0, (1 << 31) - 1),
        type=None if kind is None else _one_of("--plan: tier_type", str(kind), _RAM_TYPES),
        policy=_one_of("--plan: tier_policy", str(plan.get("tier_policy", "fill")), KV_POLICIES),
        cpu_tokens=None if border is None else _in_range("--plan: tier_cpu_tokens", int(border), 0, 1 << 20),
        share=None if share is None else min(max(float(share), 0.0), 1.0),
    )


def _merged_tiers(limits: Limits, saved: Tiers | None) -> tuple[Limits, Tiers | None]:
    """The limits, and a saved plan's tiers where the flags leave them; a policy is kept in either case."""
    if saved is None:
        return limits, None
    policy = saved.policy if limits.kv_policy == Limits().kv_policy else limits.kv_policy
    if limits.kv_vram is not None or limits.kv_ram_type is not None:  # the flags say how KV lies
        return replace(limits, kv_policy=policy), None
    return limits, replace(saved, policy=policy)


@dataclass(frozen=True)
class Question:
    """What to ask: a prompt and perhaps a system message; and what ends the answer and what form it has."""

    text: str
    system: str | None
    raw: bool
    stops: tuple[str, ...]
    grammar: str | None = None
    json_schema: str | None = None


def question_of(flags: PromptFlags) -> Question:
    """The prompt from -p, -f or standard input. Raises UsageError when there is none."""
    if flags.prompt is not None and flags.file is not None:
        raise UsageError("-p and -f were both given", "give one of them")
    if "" in (flags.stop or ()):
        raise UsageError("a stop string cannot be empty", "leave it out, or give at least one character")
    if flags.predict < -2:
        raise UsageError(f"-n {flags.predict} is out of range", "give a number of tokens, or -1 for no limit")
    if flags.raw and flags.system is not None:
        raise UsageError("-sys needs the chat template, and --raw leaves it out", "leave one of them out")
    text = _prompt_text(flags)
    if not text:
        raise UsageError("the prompt is empty", "give some text with -p, -f or on standard input")
    stops = tuple(typed_text(stop, errors="surrogateescape") for stop in flags.stop or ())
    system = None if flags.system is None else typed_text(flags.system)
    if flags.escape:
        text, stops = unescaped(text), tuple(unescaped(stop, "surrogateescape") for stop in stops)
        system = None if system is None else unescaped(system)
    return Question(text, system, flags.raw, stops, *_form(flags))


_ESCAPE = re.compile(r"\\(?:x([0-9a-fA-F]{2})|([nrt'\"\\]))")
_ESCAPED = {"n": "\n", "r": "\r", "t": "\t"}


def unescaped(text: str, errors: str = "replace") -> str:
    """`text` with llama.cpp's escapes (string_process_escapes) as what they stand for; others stay as they are.

    `\\xHH` is a byte: several in a row can make one character of UTF-8.
    """

    def meant(match: re.Match[str]) -> bytes:
        code, letter = match.groups()
        return bytes((int(code, 16),)) if code else _ESCAPED.get(letter, letter).encode()

    parts, end = [], 0
    for match in _ESCAPE.finditer(text):
        parts += [text[end : match.start()].encode("utf-8", "surrogateescape"), meant(match)]
        end = match.end()
    return b"".join((*parts, text[end:].encode("utf-8", "surrogateescape"))).decode("utf-8", errors)


def _form(flags: PromptFlags) -> tuple[str | None, str | None]:
    """The grammar and the JSON schema: at most one."""
    given = {"--grammar": flags.grammar, "--grammar-file": flags.grammar_file, "-j": flags.json_schema,
             "-jf": flags.json_schema_file}  # fmt: skip
    named = [flag for flag, value in given.items() if value is not None]
    if len(named) > 1:
        raise UsageError(f"{named[0]} and {named[1]} were both given", "give one of them")
    grammar = None if flags.grammar is None else typed_text(flags.grammar)
    schema = None if flags.json_schema is None else typed_text(flags.json_schema)
    if flags.grammar_file is not None:
        grammar = read_text(flags.grammar_file, "the grammar file")
    if flags.json_schema_file is not None:
        schema = read_text(flags.json_schema_file, "the schema file")
    return grammar, schema


def typed_text(word: str, errors: str = "replace") -> str:
    """A word of the command line as UTF-8 text, whatever the locale; what is no UTF-8 becomes a mark."""
    return word.encode("utf-8", "surrogateescape").decode("utf-8", errors)


def read_text(name: str, what: str) -> str:
    """The UTF-8 text of a file that the user names; `what` it is, for messages. Raises NotFound, UsageError."""
    try:
        with open_named(Path(name), pipes=True) as file:
            return _text_of(file, f"{what} {name}")
    except OSError as error:
        raise NotFound(f"{what} {name} cannot be read: {error.strerror}", "give the name of a text file") from None
    except ValueError:
        raise NotFound(f"{name!a} cannot be the name of a file", "give the name of a text file") from None


def _prompt_text(flags: PromptFlags) -> str:
    if flags.file is not None:
        return read_text(flags.file, "the prompt file")
    if flags.prompt is not None and flags.prompt != "-":
        return typed_text(flags.prompt)
    if sys.stdin is None or (flags.prompt is None and sys.stdin.isatty()):
        raise UsageError("there is no prompt", 'give one with -p "..." or -f FILE, or pipe text in')
    return _text_of(sys.stdin.buffer, "standard input")


def _text_of(file: BinaryIO, name: str) -> str:
    data = file.read(_LONGEST_PROMPT + 1)
    if len(data) > _LONGEST_PROMPT:
        raise UsageError(f"{name} holds more than {format_size(_LONGEST_PROMPT)}", "no model reads a prompt that long")
    try:
        return data.decode("utf-8-sig").removesuffix("\n")
    except UnicodeDecodeError:
        marks = {codecs.BOM_UTF32_LE: "UTF-32", codecs.BOM_UTF16_LE: "UTF-16", codecs.BOM_UTF16_BE: "UTF-16"}
        encoding = next((known for mark, known in marks.items() if data.startswith(mark)), "")
        what = f"{name} is {encoding} text" if encoding else f"{name} is not UTF-8 text"
        raise UsageError(what, f"convert it: iconv -f {encoding or 'ENCODING'} -t UTF-8") from None


def sample_changes(flags: Any, suggested: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of SampleOptions that differ from its defaults: the flags' (SampleFlags, or some of them), then what the
    model's maker suggests."""
    from ..sample.sampler import parse_samplers

    changes: dict[str, Any] = dict(suggested)
    for field in fields(flags):
        value = getattr(flags, field.name)
        if value is None or field.name == "seed":
            continue
        if field.name == "logit_bias":
            value = tuple(_bias(text) for text in value)
        elif field.name == "samplers":
            value = parse_samplers(value)
        changes[_SAMPLE_NAMES.get(field.name, field.name)] = value
    return changes


def _bias(text: str) -> tuple[int, float]:
    """llama.cpp's `15043+1`, `15043-1.5`, `15043-inf`; and `15043=1.5`."""
    digits = len(text) - len(text.lstrip("0123456789"))
    token, rest = text[:digits], text[digits:].removeprefix("=")
    try:
        return int(token), float(rest)
    except ValueError:
        raise UsageError(
            f"--logit-bias {text} is not a token id with a bias", "for example 15043+1 or 15043-inf"
        ) from None
