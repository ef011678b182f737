"""What a Hugging Face folder holds, read as plain JSON and headers: nothing in it is run, unpickled or believed.

Knows safetensors headers, index files, and the ways a tokenizer is stored; no torch, no transformers. Invariant: every
check here happens before a tensor is read, and names the file and the numbers at fault.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import BadFile, Failed, NotFound, UsageError
from ..model_file.foreign import name_foreign
from ..named_files import open_named
from ..printable import printable
from .target import shown

_MOST_JSON = 256 << 20
_MOST_HEADER = 100 << 20
_BYTES = {"F64": 8, "I64": 8, "U64": 8, "F32": 4, "I32": 4, "U32": 4, "F16": 2, "BF16": 2, "I16": 2, "U16": 2}
_EMBEDDINGS = re.compile(
    r"(?:^|\.)(?:embed_tokens|tok_embeddings|wte|(?:embeddings\.)?word_embeddings|embed_in|embedding)\.weight$"
)
_PART = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.safetensors")
_QUANTIZED = {"gptq": "GPTQ", "awq": "AWQ", "bitsandbytes": "bitsandbytes", "bnb": "bitsandbytes"}
_READ = {"", "bitnet", "compressed-tensors", "fp8", "modelopt", "mxfp4"}  # the converter turns these back into floats
_LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks?)\.(\d+)\.")
_LAYER_COUNTS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers")
_QUANTIZED_TENSORS = ((".qweight", "GPTQ or AWQ"), (".SCB", "bitsandbytes"), (".quant_state.", "bitsandbytes"))


@dataclass(frozen=True)
class Folder:
    """`tensors`: name → (dtype, shape), empty for pickles; `rows`: of the token embedding, 0 when unknown; `ends`: ids
    of the tokens that end an answer, each once, generation_config.json's before config.json's."""

    path: Path
    config: Mapping[str, Any]
    weights: tuple[Path, ...]
    pickled: bool
    tensors: Mapping[str, tuple[str, tuple[int, ...]]]
    rows: int
    tokens: Mapping[int, str]
    wants_code: tuple[str, ...]
    ends: tuple[int, ...] = ()

    @property
    def elements(self) -> int:
        """Number of weights; 0 when the weights are pickles."""
        return sum(_count(shape) for _, shape in self.tensors.values())


def read_folder(path: Path, allow_pickle: bool = False) -> Folder:
    """The folder at `path`, checked. Raises NotFound, UsageError, BadFile or Failed with what is wrong and where."""
    if not path.exists():
        raise NotFound(f"{shown(path)} does not exist")
    if not path.is_dir():
        raise UsageError(f"{shown(path)} is not a folder", "give the folder with config.json and the weights")
    _refuse_adapter(path)
    config = _json(path / "config.json", required=True)
    _refuse_quantized(path, config)
    weights, pickled = _weights(path, allow_pickle)
    tensors = {} if pickled else _tensors(path, weights)
    _check_layers(path, config, tensors)
    rows = next((shape[0] for name, (_, shape) in tensors.items() if _EMBEDDINGS.search(name) and len(shape) == 2), 0)
    tokens = _tokens(path)
    _check_vocabulary(path, rows, tokens)
    wants = tuple(name for name in ("config.json", "tokenizer_config.json") if _json(path / name).get("auto_map"))
    return Folder(path, config, weights, pickled, tensors, rows, tokens, wants, _ends(path, config))


def _ends(path: Path, config: Mapping[str, Any]) -> tuple[int, ...]:
    """generation_config.json decides, as in the model's own library; a list in config.json counts as well."""
    text = config.get("text_config")
    found: dict[int, None] = {}
    for holder in (_json(path / "generation_config.json"), config, text if isinstance(text, dict) else {}):
        given = holder.get("eos_token_id")
        if isinstance(given, list) or not found:
            ids = given if isinstance(given, list) else [given]
            found.update(dict.fromkeys(number for number in ids if type(number) is int and number >= 0))
    return tuple(found)


def hashed_files(folder: Folder) -> tuple[Path, ...]:
    """The files that the result depends on: the weights and every small text file, in a fixed order."""
    small = (".json", ".txt", ".model", ".jinja")
    others = (p for p in folder.path.iterdir() if p.is_file() and p.suffix in small and p not in folder.weights)
    return (*sorted(others, key=lambda p: p.name), *folder.weights)


def pre_tokenizer_of(path: Path) -> str:
    """The `pre_tokenizer` of the folder's tokenizer.json in short, for messages; empty when there is none."""
    found = _json(path / "tokenizer.json").get("pre_tokenizer")
    return printable(json.dumps(found, ensure_ascii=False), limit=240) if found else ""


def _weights(path: Path, allow_pickle: bool) -> tuple[tuple[Path, ...], bool]:
    parts = sorted(p for p in path.glob("model*.safetensors") if p.is_file())
    index = path / "model.safetensors.index.json"
    if index.exists():
        return _indexed(path, index), False
    if parts:
        _check_numbering(parts)
        return tuple(parts), False
    pickles = sorted(path.glob("pytorch_model*.bin"))
    if not pickles:
        raise NotFound(
            f"{shown(path)} holds no weights", "model.safetensors or model-00001-of-0000N.safetensors is expected"
        )
    if not allow_pickle:
        raise Failed(
            f"{shown(pickles[0])} is a pickle, which can run code, and is not opened",
            "use a folder with safetensors; for files you trust: --allow-pickle",
        )
    pickle_index = path / "pytorch_model.bin.index.json"
    return (_indexed(path, pickle_index) if pickle_index.exists() else tuple(pickles)), True


def _refuse_adapter(path: Path) -> None:
    whole = any(path.glob("model*.safetensors")) or any(path.glob("pytorch_model*.bin"))
    if (path / "adapter_config.json").exists() and not whole:
        base = printable(
            str(_json(path / "adapter_config.json").get("base_model_name_or_path", "another model")), limit=100
        )
        raise Failed(
            f"{shown(path)} is an adapter (LoRA) for {base}, not a model", "merge it into its base model first"
        )


def _indexed(path: Path, index: Path) -> tuple[Path, ...]:
    mapping = _json(index).get("weight_map")
    if not isinstance(mapping, dict) or not mapping or not all(isinstance(name, str) for name in mapping.values()):
        raise BadFile(f"{shown(index)} has no weight_map", "fetch the folder again")
    names = sorted(set(mapping.values()))
    outside = next((name for name in names if Path(name).name != name), None)
    if outside is not None:
        raise BadFile(f"{shown(index)} names a file outside the folder: {printable(outside, limit=80)}")
    missing = [name for name in names if not (path / name).is_file()]
    if missing:
        raise NotFound(
            f"{len(missing)} of {len(names)} weight files are missing: {shown(path / missing[0])}",
            "fetch the missing files",
        )
    return tuple(path / name for name in names)


def _check_numbering(parts: list[Path]) -> None:
    for part in parts:
        match = _PART.fullmatch(part.name)
        if match is None:
            continue
        for number in range(1, int(match[3]) + 1):
            wanted = part.with_name(f"{match[1]}-{number:05d}-of-{match[3]}.safetensors")
            if not wanted.exists():
                raise NotFound(f"a weight file is missing: {shown(wanted)}", "fetch the missing file")


def _refuse_quantized(path: Path, config: Mapping[str, Any]) -> None:
    for holder in (config, config.get("text_config")):
        if isinstance(holder, dict) and (kind := _quantized_with(holder)):
            raise _already(path, kind)
    if (path / "quantize_config.json").exists() and "quantization_config" not in config:
        raise _already(path, _QUANTIZED["gptq"])


def _quantized_with(config: Mapping[str, Any]) -> str:
    """The name of the method, empty for none and for those that the converter reads."""
    found = config.get("quantization_config")
    if isinstance(config.get("quantization"), dict) and found is None:
        return "MLX"
    if not isinstance(found, dict):
        return ""
    method = str(found.get("quant_method") or "").lower()
    if not method and (found.get("load_in_4bit") or found.get("load_in_8bit")):
        method = "bitsandbytes"
    return "" if method in _READ else _QUANTIZED.get(method, printable(method, limit=40))


def _check_layers(path: Path, config: Mapping[str, Any], tensors: Mapping[str, object]) -> None:
    """Every layer that config.json promises must have a tensor."""
    text = config.get("text_config")
    holders = (config, text if isinstance(text, dict) else {})
    counts = [holder[key] for holder in holders for key in _LAYER_COUNTS if type(holder.get(key)) is int]
    found = {int(match[1]) for match in map(_LAYER.search, tensors) if match}
    if not counts or not found:
        return
    absent = counts[0] - sum(number < counts[0] for number in found)
    if absent > 0:
        first = next(number for number in range(counts[0]) if number not in found)
        raise BadFile(
            f"{shown(path)} lacks {absent} of {counts[0]} layers; layer {first} is the first that is absent",
            "fetch the folder again: files with weights are missing, or config.json is another model's",
        )


def _already(path: Path, kind: str) -> Failed:
    return Failed(f"{shown(path)} is already quantized with {kind}", "convert the original, unquantized model")


def _tensors(path: Path, weights: tuple[Path, ...]) -> dict[str, tuple[str, tuple[int, ...]]]:
    found: dict[str, tuple[str, tuple[int, ...]]] = {}
    for part in weights:
        found.update(_header(part))
    index = path / "model.safetensors.index.json"
    if index.exists():
        absent = sorted(set(_json(index)["weight_map"]) - set(found))
        if absent:
            raise BadFile(
                f"{shown(index)} names {len(absent)} tensors that no file has: {printable(absent[0], limit=80)}"
            )
    for suffix, kind in _QUANTIZED_TENSORS:
        if any(suffix in name for name in found):
            raise _already(path, kind)
    return found


def _header(part: Path) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Names, types and shapes in one safetensors file; the file must be as long as its header says."""
    size = part.stat().st_size
    with part.open("rb") as file:
        start = file.read(512)
        length = int.from_bytes(start[:8], "little")
        if len(start) < 9 or start[8:9] != b"{":
            what, hint = name_foreign(start) if start else ("an empty file", "fetch it again")
            raise BadFile(f"{shown(part)} is not a safetensors file: it is {what}", hint)
        if length > min(size - 8, _MOST_HEADER):
            raise BadFile(
                f"{shown(part)} is cut short: its header claims {length:,} bytes, {size - 8:,} follow", "fetch it again"
            )
        file.seek(8)
        try:
            header = json.loads(file.read(length))
            entries = {name: entry for name, entry in header.items() if name != "__metadata__"}
            end = max((int(entry["data_offsets"][1]) for entry in entries.values()), default=0)
            found = {name: (str(e["dtype"]), tuple(int(n) for n in e["shape"])) for name, e in entries.items()}
        except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError):
            raise BadFile(f"{shown(part)} has a damaged header", "fetch it again") from None
    expected = 8 + length + end
    if size != expected:
        verb = "cut short" if size < expected else "longer than its header says"
        raise BadFile(f"{shown(part)} is {verb}: {expected:,} bytes expected, {size:,} present", "fetch it again")
    return found


def _tokens(path: Path) -> dict[int, str]:
    """Token id → text from every place where a tokenizer may keep them."""
    found: dict[int, str] = {}
    tokenizer = _json(path / "tokenizer.json")
    model = tokenizer.get("model")
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    if isinstance(vocabulary, dict):
        found.update(_by_id(vocabulary))
    elif isinstance(vocabulary, list):
        found.update(
            {index: str(entry[0]) for index, entry in enumerate(vocabulary) if isinstance(entry, list) and entry}
        )
    for entry in tokenizer.get("added_tokens") or ():
        if isinstance(entry, dict) and isinstance(entry.get("id"), int):
            found[entry["id"]] = str(entry.get("content", ""))
    for name in ("vocab.json", "added_tokens.json"):
        found.update(_by_id(_json(path / name)))
    decoder = _json(path / "tokenizer_config.json").get("added_tokens_decoder")
    if isinstance(decoder, dict):
        found.update(
            {int(k): str(v.get("content", "")) for k, v in decoder.items() if k.isdigit() and isinstance(v, dict)}
        )
    if not found and (path / "vocab.txt").is_file():
        lines = (path / "vocab.txt").read_text(encoding="utf-8", errors="replace").splitlines()
        found.update(enumerate(lines))
    return found


def _by_id(vocabulary: Mapping[str, Any]) -> dict[int, str]:
    return {number: text for text, number in vocabulary.items() if type(number) is int}


def _check_vocabulary(path: Path, rows: int, tokens: Mapping[int, str]) -> None:
    if not rows or not tokens:
        return
    extra = sorted(number for number in tokens if number >= rows)
    if extra:
        names = ", ".join(f"{number} '{printable(tokens[number], limit=40)}'" for number in extra[:8])
        more = f" and {len(extra) - 8} more" if len(extra) > 8 else ""
        raise BadFile(
            f"{shown(path)} has {max(tokens) + 1:,} tokens but only {rows:,} embedding rows; none for: {names}{more}",
            "resize the embedding to the tokenizer and save again, or drop the added tokens",
        )


def _json(path: Path, required: bool = False) -> dict[str, Any]:
    """The JSON object in `path`; empty when the file is absent and not `required`. Raises BadFile."""
    try:
        if path.stat().st_size > _MOST_JSON:
            raise BadFile(f"{shown(path)} is too large to be what its name says")
        with open_named(path) as file:
            content = json.loads(file.read())
    except (FileNotFoundError, NotADirectoryError):
        if required:
            raise NotFound(f"{shown(path)} is missing", "give the folder of a Hugging Face model") from None
        return {}
    except OSError as error:
        raise BadFile(f"{shown(path)} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError):
        raise BadFile(f"{shown(path)} is not valid JSON", "fetch it again") from None
    if not isinstance(content, dict):
        raise BadFile(f"{shown(path)} does not hold a JSON object", "fetch it again")
    return content


def _count(shape: tuple[int, ...]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count
