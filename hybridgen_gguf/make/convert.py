"""A Hugging Face folder into a GGUF file: checks, the engine's own converter in a confined child, checks of the result.

Knows the order of things; the folder's rules are in `folder.py`, the converter's in `converter.py`. Invariant: the
target is published only after the engine has opened it and its tokenizer has been compared with the folder's own.
"""

from __future__ import annotations

import importlib.util
import os
import re
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..engine.jobs.digest import sha256_of
from ..engine.pin import SOURCE_SHA256
from ..errors import EngineError, Failed, UsageError
from ..folders import cache_folder
from ..model_file.split import ModelFile, open_model_file
from ..model_file.types import row_bytes
from ..model_file.validation import bad_numbers
from ..printable import printable
from . import recipe
from .folder import Folder, hashed_files, read_folder
from .job import run_job, stoppable
from .target import check_room, check_target, publish, remove, scratch_for, shown, starts_again

Progress = Callable[[str, int, int], None]
TYPES = ("auto", "f16", "bf16", "q8_0", "f32")
_NEEDED = ("torch", "transformers", "safetensors", "sentencepiece")
# What every tokenizer must split as the folder's does: words, digits, accents, Chinese, emoji, code.
COMMON_TEXTS = (
    "Hello, world! I'm sure they've seen 3 or 33 or 333 or 1234567 of them, it's 3.14.",
    "À côté: naïve café, Ångström, über, straße, señor.",
    "我们在北京吃了3碗面条，然后去了apple商店。",
    "😀 🚀🚀 ✅ ok 🦙",
    "def f(x):\n    return {'a': x**2, \"b\": [1.5e-3, 0xFF]}  # comment\n\n\tif x != y && z >= 10: i++;",
)
# Where the engine is known to differ for some vocabularies without harm: a difference here is told, not refused.
RARE_TEXTS = (
    "日本語のテキスト、한국어 문장. Привет, мир!",
    "👩‍👩‍👧 🇫🇷 ✅️ a\u0301 e\u0300 ﬁ ı",
    "שלום مرحبا ไทย कि ကို",
    "   three spaces   end  ------====\r\n\n\n \t end  ",
    "'RE you sure? 'M not, 'D you like I'LL 3..3 3...3",
)


@dataclass(frozen=True, slots=True)
class ConvertOptions:
    """`type`: one of TYPES; `pre_tokenizer`: overrides what the converter would pick, empty otherwise;
    `bits_after`: a weight, of what will be written beside the target before that is removed."""

    folder: Path
    target: Path
    type: str = "auto"
    pre_tokenizer: str = ""
    trust_remote_code: bool = False
    allow_pickle: bool = False
    name: str = ""
    source_dir: Path | None = None
    bits_after: float = 0.0


@dataclass(frozen=True, slots=True)
class TokenCheck:
    """`compared`: number of tokens, 0 when nothing could be compared; `first_difference`: empty when equal."""

    compared: int
    equal: bool
    first_difference: str


@dataclass(frozen=True, slots=True)
class ConvertResult:
    """What was written."""

    path: Path
    bytes: int
    bpw: float
    types: Mapping[str, int]
    sha256: str
    tokens: TokenCheck
    pre_tokenizer: str
    manifest: Path
    recipe: Mapping[str, str]
    warnings: tuple[str, ...]


def convert(options: ConvertOptions, progress: Progress | None = None) -> ConvertResult:
    """Writes the GGUF file and its manifest. `progress(stage, done, of)` in bytes.

    Raises UsageError, NotFound, BadFile, NoSpace or Failed; the target is then what it was before.
    """
    if options.type not in TYPES:
        raise UsageError(f"'{options.type}' is not a type that convert writes", "one of: " + ", ".join(TYPES))
    with stoppable():
        check_target(options.target, [options.folder])
        folder = read_folder(options.folder, options.allow_pickle)
        source_dir = options.source_dir or converter_folder()
        _check_pre_tokenizer(options.pre_tokenizer, source_dir)
        _check_packages()
        check_room(options.target, _expected_bytes(folder, options.type, options.bits_after))
        warnings = starts_again(options.target) + _warnings(options, folder)
        return _run(options, folder, source_dir, warnings, progress)


def converter_folder() -> Path:
    """The pinned engine sources with the converter: HGGUF_CONVERTER, or what the set-up left in the user's cache."""
    path = Path(os.environ.get("HGGUF_CONVERTER") or cache_folder() / "source" / SOURCE_SHA256[:16])
    if (path / "convert_hf_to_gguf.py").is_file():
        return path
    raise Failed(
        f"the converter was not found in {shown(path)}",
        "run scripts/setup, which unpacks the engine's sources",
    )


def known_pre_tokenizers(source_dir: Path) -> frozenset[str]:
    """The names that the converter can write, read from its source."""
    text = (source_dir / "conversion" / "base.py").read_text(encoding="utf-8")
    return frozenset(re.findall(r'^\s+res = "([^"]+)"', text, re.MULTILINE)) | {"default"}


def _check_pre_tokenizer(name: str, source_dir: Path) -> None:
    if name and name not in (known := known_pre_tokenizers(source_dir)):
        raise UsageError(f"'{name}' is not a pre-tokenizer of the engine", "known: " + ", ".join(sorted(known)))


def _check_packages() -> None:
    absent = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if absent:
        raise Failed(
            f"convert needs packages that are not installed: {', '.join(absent)}",
            "pip install 'hybridgen-gguf[convert]'",
        )


def _expected_bytes(folder: Folder, kind: str, bits_after: float) -> int:
    """Bytes of the result, a little too many: every tensor in the new type, and room for the vocabulary; and of what
    comes after it."""
    each = {"f32": 4.0, "q8_0": row_bytes("Q8_0", 32) / 32}.get(kind, 2.0)
    weights = folder.elements or sum(path.stat().st_size for path in folder.weights) // 2
    return int(weights * (each + bits_after / 8)) + 200 * len(folder.tokens) + (1 << 20)


def _warnings(options: ConvertOptions, folder: Folder) -> tuple[str, ...]:
    found = []
    if options.trust_remote_code:
        found.append("code from the model's folder may run, because --trust-remote-code was given")
    elif folder.wants_code:
        found.append(f"{' and '.join(folder.wants_code)} ask for code of the model's own; it was not run")
    if folder.pickled:
        found.append("the weights are pickles, read because --allow-pickle was given")
    return tuple(found)


def _run(
    options: ConvertOptions, folder: Folder, source_dir: Path, warnings: tuple[str, ...], progress: Progress | None
) -> ConvertResult:
    scratch = scratch_for(options.target)
    made_of = {
        "tool": recipe.tool_version(),
        "source_sha256": sha256_of(*hashed_files(folder)),
        "options": recipe.canonical(
            {"type": options.type, "pre_tokenizer": options.pre_tokenizer, "name": options.name}
        ),
    }

    def tell(event: Mapping[str, Any]) -> None:
        if progress is not None:
            progress(event.get("stage", "writing"), event.get("done", 0), event.get("of", 0))

    try:
        with tempfile.TemporaryDirectory() as modules:
            done = run_job("convert", _job(options, folder, source_dir, made_of), tell, [scratch], _closed(modules))
        tokens, left_out = _check_result(options, scratch, done["tokens"], folder.ends)
        model = open_model_file(scratch)
        warnings += _about_numbers(model)
        digest = sha256_of(scratch)
        publish(scratch, options.target)
    finally:
        remove(scratch)
    if not tokens.equal:
        warnings += (f"the file splits text differently from the folder's tokenizer: {tokens.first_difference}",)
    elif not tokens.compared:
        warnings += ("the folder's tokenizer could not be opened, so the file's was not compared with it",)
    if left_out:
        names = ", ".join(f"{token} '{printable(folder.tokens.get(token, ''), limit=40)}'" for token in left_out)
        warnings += (f"the file will not end answers at {names}: a GGUF file has no place for so many end tokens",)
    weights = sum(tensor.parameters for tensor in model.tensors)
    types = {kind: sum(t.type == kind for t in model.tensors) for kind in dict.fromkeys(t.type for t in model.tensors)}
    content = {
        "files": [{"name": options.target.name, "bytes": model.bytes, "sha256": digest}],
        "recipe": made_of,
        "types": types,
    }
    return ConvertResult(
        path=options.target,
        bytes=model.bytes,
        bpw=sum(tensor.bytes for tensor in model.tensors) * 8 / weights,
        types=types,
        sha256=digest,
        tokens=tokens,
        pre_tokenizer=done["pre_tokenizer"],
        manifest=recipe.write_manifest(options.target, content),
        recipe=made_of,
        warnings=warnings,
    )


def _about_numbers(model: ModelFile) -> tuple[str, ...]:
    found = bad_numbers(model)
    more = f", and {len(found) - 1} other tensors do as well" if len(found) > 1 else ""
    return (f"{found[0]}{more}: the folder's weights are damaged, and the model may write nothing",) if found else ()


def _job(options: ConvertOptions, folder: Folder, source_dir: Path, made_of: Mapping[str, str]) -> dict[str, Any]:
    # The converter names a nameless model after its folder: the absolute path must not change the bytes, its name may.
    return {
        "converter": str(source_dir.resolve()),
        "folder": str(options.folder.resolve()),
        "scratch": str(scratch_for(options.target).absolute()),
        "type": options.type,
        "name": options.name,
        "rows": folder.rows,
        "ends": list(folder.ends) if len(folder.ends) > 1 else [],
        "pre_tokenizer": options.pre_tokenizer,
        "allow_code": options.trust_remote_code,
        "allow_pickle": options.allow_pickle,
        "metadata": recipe.entries(made_of, "hgguf.convert."),
        "texts": [*COMMON_TEXTS, *RARE_TEXTS],
    }


def _closed(modules: str) -> dict[str, str]:
    """Environment that keeps the libraries from the network and from the user's own caches of remote code."""
    return {
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "HF_MODULES_CACHE": modules,
        "TOKENIZERS_PARALLELISM": "false",
        "NO_LOCAL_GGUF": "1",
    }


def _check_result(
    options: ConvertOptions, scratch: Path, expected: list[list[int]] | None, ends: tuple[int, ...]
) -> tuple[TokenCheck, list[int]]:
    """Opens the file with the engine; compares the tokenizers, a difference in common text is an error. And the ids of
    `ends` at which the engine would not end."""
    texts = [*COMMON_TEXTS, *RARE_TEXTS]
    try:
        job = {"model": str(scratch), "texts": texts, "with_context": True, "ends": list(ends)}
        found = run_job("tokenize", job, None, [scratch])
    except EngineError as error:
        raise Failed(f"the engine cannot open what {shown(options.folder)} converts to: {error.what}") from None
    return _compared(options, found["tokens"], expected), found["not_ends"]


def _compared(options: ConvertOptions, found: list[list[int]], expected: list[list[int]] | None) -> TokenCheck:
    if expected is None:
        return TokenCheck(0, True, "")
    texts = [*COMMON_TEXTS, *RARE_TEXTS]
    compared = sum(map(len, expected))
    differing = [index for index, (ours, theirs) in enumerate(zip(found, expected, strict=True)) if ours != theirs]
    if not differing:
        return TokenCheck(compared, True, "")
    first = differing[0]
    difference = _difference(texts[first], expected[first], found[first])
    if first < len(COMMON_TEXTS) and not options.pre_tokenizer:
        raise Failed(
            f"the converted file would split text differently from {shown(options.folder)}: {difference}",
            "nothing was written; to accept a known pre-tokenizer's splits, name it: --pre-tokenizer NAME",
        )
    return TokenCheck(compared, False, difference)


def _difference(text: str, expected: list[int], found: list[int]) -> str:
    pairs = enumerate(zip(expected, found, strict=False))
    at = next((i for i, (a, b) in pairs if a != b), min(len(expected), len(found)))
    return (
        f"in '{printable(text, limit=40)}' token {at} is {_at(expected, at)} in the folder, {_at(found, at)} here "
        f"({len(expected)} and {len(found)} tokens)"
    )


def _at(tokens: list[int], index: int) -> str:
    return str(tokens[index]) if index < len(tokens) else "missing"
