"""What the user said → what the modules below take: flags become Limits, SampleOptions and a prompt.

Reads the prompt's file and standard input, nothing else. Invariant: everything that is wrong is a UsageError that names
the flag, before any model is opened.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from .engine.settings import FLASH_ATTENTION, KV_TYPES, SPLIT_MODES
from .errors import NotFound, UsageError
from .options import PlaceFlags, PromptFlags, SampleFlags
from .plan import Limits
from .units import parse_size

_SAMPLE_NAMES = {  # flag's field: SampleOptions' field, where they differ
    "temp": "temperature",
    "typical": "typical_p",
    "top_nsigma": "top_n_sigma",
    "dynatemp_exp": "dynatemp_exponent",
}


def limits_of(flags: PlaceFlags, tokens_needed: int = 0) -> Limits:
    """Limits of the placement flags. `tokens_needed`: what the prompt and its answer ask for."""
    limits = Limits(
        n_ctx=flags.ctx_size or None if flags.ctx_size is None or flags.ctx_size >= 0 else flags.ctx_size,
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
        kv_offload=not flags.no_kv_offload,
        overrides=_overrides(flags.override_tensor or (), flags.n_cpu_moe),
        devices=tuple(flags.device.split(",")) if flags.device else None,
        split_mode=_one_of("-sm", flags.split_mode, SPLIT_MODES),
        main_gpu=flags.main_gpu,
        tensor_split=_shares(flags.tensor_split),
        use_mmap=not flags.no_mmap,
        use_mlock=flags.mlock,
    )
    return _from_plan_file(flags.plan, limits) if flags.plan else limits


def _size(flag: str, text: str | None) -> int | None:
    if text is None:
        return None
    try:
        return parse_size(text)
    except UsageError as error:
        raise UsageError(f"{flag}: {error.what}", error.hint) from None


def _threads(flag: str, count: int | None) -> int | None:
    """-1 is llama.cpp's spelling of "choose for me"."""
    if count is None or count == -1:
        return None
    if not 1 <= count <= 1024:
        raise UsageError(f"{flag} {count} is out of range", "give 1 to 1024, or leave it out")
    return count


def _layers(text: str | None) -> int | None:
    if text is None or text == "auto":
        return None
    if text == "all":
        return -1
    try:
        return int(text)
    except ValueError:
        raise UsageError(f"-ngl {text} is not a number of layers", "give a number, auto or all") from None


def _one_of(flag: str, value: str, allowed: Mapping[str, int]) -> str:
    if value not in allowed:
        raise UsageError(f"{flag} {value} is not known", f"one of: {', '.join(allowed)}")
    return value


def _overrides(texts: Sequence[str], cpu_experts: int | None) -> tuple[tuple[str, str], ...]:
    pairs = []
    for part in ",".join(texts).split(",") if texts else ():
        pattern, equals, buffer_type = part.rpartition("=")
        if not equals or not pattern or not buffer_type:
            raise UsageError(f"-ot {part} is not PATTERN=TYPE", "for example -ot 'ffn_.*_exps=CPU'")
        pairs.append((pattern, buffer_type))
    if cpu_experts is not None and cpu_experts < 0:
        raise UsageError(f"-ncmoe {cpu_experts} is out of range", "give the number of layers")
    pairs += [(rf"blk\.{layer}\.ffn_(up|down|gate)_(ch|)exps", "CPU") for layer in range(cpu_experts or 0)]
    return tuple(pairs)


def _shares(text: str | None) -> tuple[float, ...]:
    if text is None:
        return ()
    try:
        shares = tuple(float(part) for part in text.replace("/", ",").split(","))
    except ValueError:
        raise UsageError(f"-ts {text} is not a list of numbers", "for example -ts 3,1") from None
    if not all(0 <= share < float("inf") for share in shares):
        raise UsageError(f"-ts {text} holds a share below zero", "for example -ts 3,1")
    return shares


def _from_plan_file(name: str, limits: Limits) -> Limits:
    """A saved plan fixes what the flags leave open."""
    try:
        data = json.loads(Path(name).read_text(encoding="utf-8"))
        plan = data.get("plan", data)
        fixed = {
            "n_ctx": int(plan["n_ctx"]),
            "n_gpu_layers": int(plan["n_gpu_layers"]),
            "threads": int(plan["threads"]["decode"]),
            "threads_batch": int(plan["threads"]["prompt"]),
            "n_batch": int(plan["batch"]["n_batch"]),
            "n_ubatch": int(plan["batch"]["n_ubatch"]),
        }
        kv = {name: _one_of("--plan", str(plan["kv"][name]), KV_TYPES) for name in ("type_k", "type_v")}
    except OSError as error:
        raise NotFound(f"the plan {name} cannot be read: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError):
        raise UsageError(f"{name} is not a plan", "make one with `hgguf plan MODEL --json > plan.json`") from None
    left_open = {key: value for key, value in fixed.items() if getattr(limits, key) is None}
    defaults = Limits()
    kv_left = {key: value for key, value in kv.items() if getattr(limits, key) == getattr(defaults, key)}
    return replace(limits, **left_open, **kv_left)  # type: ignore[arg-type]  # keys and types are those above


@dataclass(frozen=True)
class Question:
    """What to ask: a prompt and perhaps a system message."""

    text: str
    system: str | None
    raw: bool


def question_of(flags: PromptFlags) -> Question:
    """The prompt from -p, -f or standard input. Raises UsageError when there is none."""
    if flags.prompt is not None and flags.file is not None:
        raise UsageError("-p and -f were both given", "give one of them")
    if flags.raw and flags.system is not None:
        raise UsageError("-sys needs the chat template, and --raw leaves it out", "leave one of them out")
    text = _prompt_text(flags)
    if not text:
        raise UsageError("the prompt is empty", "give some text with -p, -f or on standard input")
    return Question(text, flags.system, flags.raw)


def _prompt_text(flags: PromptFlags) -> str:
    if flags.file is not None:
        try:
            return Path(flags.file).read_text(encoding="utf-8-sig").removesuffix("\n")
        except UnicodeDecodeError:
            raise UsageError(f"the prompt file {flags.file} is not UTF-8 text", "convert it: iconv -t UTF-8") from None
        except OSError as error:
            raise NotFound(f"the prompt file {flags.file} cannot be read: {error.strerror}") from None
    if flags.prompt is not None and flags.prompt != "-":
        return flags.prompt.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
    if sys.stdin is None or (flags.prompt is None and sys.stdin.isatty()):
        raise UsageError("there is no prompt", 'give one with -p "..." or -f FILE, or pipe text in')
    try:
        return sys.stdin.buffer.read().decode("utf-8-sig").removesuffix("\n")
    except UnicodeDecodeError:
        raise UsageError("standard input is not UTF-8 text", "convert it: iconv -t UTF-8") from None


def sample_changes(flags: SampleFlags, suggested: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of SampleOptions that differ from its defaults: the flags', then what the model's maker suggests."""
    from .sample import parse_samplers

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
