"""`llama_model_quantize` and its dry run, for child processes. Knows no targets, no renames, no recipes.

The forecast *is* the engine's dry run: its log names each tensor's type, and the engine's own GGUF writer counts the
header, so that forecast and file cannot disagree. Invariant: the file written is exactly `options["scratch"]`, or the
parts named after it when the split is kept.
Source: src/llama-quant.cpp, ggml/include/gguf.h, tools/quantize/quantize.cpp of the pinned engine.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ...errors import BadFile, EngineError
from ...model_file.types import ggml_type
from ...printable import printable
from .. import log
from ..abi.ggml import GgufInitParams
from ..handles import start
from .digest import Digests

Options = Mapping[str, Any]
Send = Callable[[Mapping[str, Any]], None]
_TENSOR = re.compile(r"\[ *(\d+)/ *(\d+)\] (\S+) +- \[([ \d,]+)\], type = +(\w+), (.*)")
_NEW_TYPE = re.compile(r"-> +[\d.]+ MiB \((\w+)\)")
_FALLBACK = re.compile(
    r"warning: (\S+) +- ncols +(\d+) not divisible by +(\d+) \(required for type +(\w+)\).*falling back to +(\w+)"
)
_SPLIT_KEYS = (b"split.no", b"split.count", b"split.tensors.count")
_INT, _STR = 0, 3
_NO_TYPE = 43  # GGML_TYPE_COUNT
# A tensor is worked on in slabs of this size: the bytes are the same, the memory is bounded. 256 MiB takes 4 % more of
# the processor's time than 64 or 16 (page faults), 1 MiB as much (threads started).
_SLAB = 64 << 20


def forecast_job(options: Options, _send: Send) -> dict[str, Any]:
    """`{tensors: [{name, rows, columns, from, to}], fallbacks: [...], meta_bytes}` of a run."""
    return _forecast(options)[0]


def _forecast(options: Options) -> tuple[dict[str, Any], list[bytes]]:
    """The forecast, and the headers of the files as the engine will write them."""
    log = _Log()
    params = _Params(options, dry_run=True)
    status = start().api.llama_model_quantize(options["source"].encode(), b"", ctypes.byref(params.value))
    if status != 0:
        raise _refusal(log.text)
    tensors = _tensors(log.text)
    headers = _headers(options, {tensor["name"]: tensor["to"] for tensor in tensors})
    found = {
        "tensors": tensors,
        "fallbacks": _fallbacks(log.text),
        "meta_bytes": [len(header) for header in headers],
    }
    return found, headers


def quantize_job(options: Options, send: Send) -> dict[str, Any]:
    """Writes the quantized model to `options["scratch"]`, reporting `{"done": n, "of": m, "tensor": name}`.

    With `options["recipe"]` the forecast is sent first, and nothing is written before the parent has accepted it. The
    result then has the digests of source and result, and the former lies in the file, under the key of the recipe.
    """
    digests = None
    if recipe := options.get("recipe"):
        found, headers = _forecast(options)
        send({"ask": found})
        digests = Digests(options["shards"], recipe["written"], headers, recipe["key"], recipe["unknown"])
    log = _Log(lambda done, of, name: send({"done": done, "of": of, "tensor": name}))
    params = _Params(options, dry_run=False)
    status = start().api.llama_model_quantize(
        options["source"].encode(), options["scratch"].encode(), ctypes.byref(params.value)
    )
    if status != 0:
        raise _refusal(log.text)
    missing = sorted(set(re.findall(r"did not find weights for (\S+)", log.text)))
    return {"missing_imatrix": missing, **(digests.finish() if digests else {})}


class _Log:
    """The engine's log, kept whole; tells of each tensor when its line begins."""

    def __init__(self, tell: Callable[[int, int, str], None] | None = None) -> None:
        self._pieces: list[str] = []
        self._tell = tell
        start()
        log.listen(self._add)

    @property
    def text(self) -> str:
        return "".join(self._pieces)

    def _add(self, piece: str) -> None:
        self._pieces.append(piece)
        if self._tell is not None and (match := re.match(r"\[ *(\d+)/ *(\d+)\] (\S+)", piece)):
            self._tell(int(match[1]), int(match[2]), match[3])


class _Params:
    """The engine's parameter struct and everything it points to, kept alive together."""

    def __init__(self, options: Options, dry_run: bool) -> None:
        module = start().api
        value = module.llama_model_quantize_default_params()
        value.nthread, value.ftype = options["threads"], options["file_type"]
        value.output_tensor_type = _type_id(options["output_tensor_type"])
        value.token_embedding_type = _type_id(options["token_embedding_type"])
        value.allow_requantize, value.pure = options["allow_requantize"], options["pure"]
        value.only_copy, value.keep_split = options["only_copy"], options["keep_split"]
        value.dry_run, value.max_buf_size = dry_run, _SLAB
        self.value = value
        self._kept = [
            self._point("tt_overrides", _overrides(options["tensor_types"])),
            self._point("kv_overrides", _metadata(options["metadata"])),
        ]
        if options["imatrix"]:
            self._kept += [self._point("imatrix", _imatrix(options["imatrix"]))]

    def _point(self, field: str, array: Any) -> Any:
        setattr(self.value, field, ctypes.cast(array, type(getattr(self.value, field))))
        return array


def _type_id(name: str | None) -> int:
    return _NO_TYPE if name is None else ggml_type(name).id


def _overrides(pairs: Sequence[tuple[str, str]]) -> Any:
    array = (start().api.llama_model_tensor_override * (len(pairs) + 1))()
    for item, (pattern, name) in zip(array, pairs, strict=False):
        item.pattern, item.type = pattern.encode(), ggml_type(name).id
    array[len(pairs)].type = _NO_TYPE
    return array


def _metadata(entries: Mapping[str, str | int]) -> Any:
    array = (start().api.llama_model_kv_override * (len(entries) + 1))()
    for item, (key, value) in zip(array, entries.items(), strict=False):
        item.key = key.encode()
        if isinstance(value, int):
            item.tag, item.value.val_i64 = _INT, value
        else:
            item.tag, item.value.val_str = _STR, value.encode()
    return array


def _imatrix(path: str) -> Any:
    import numpy as np

    from .imatrix_file import read_imatrix

    weights = read_imatrix(path).weights()
    array = (start().api.llama_model_imatrix_data * (len(weights) + 1))()
    floats = ctypes.POINTER(ctypes.c_float)
    for item, (name, values) in zip(array, weights.items(), strict=False):
        data = np.ascontiguousarray(values, dtype=np.float32)
        item.name, item.size, item.data = name.encode(), data.size, data.ctypes.data_as(floats)
        _ALIVE.append(data)
    return array


_ALIVE: list[Any] = []


def _tensors(log: str) -> list[dict[str, Any]]:
    tensors = []
    for match in map(_TENSOR.search, log.splitlines()):
        if match is None:
            continue
        shape = [int(size) for size in match[4].split(",")]
        rows = 1
        for size in shape[1:]:
            rows *= size
        changed = _NEW_TYPE.search(match[6])
        old = match[5].upper()
        tensors.append(
            {
                "name": match[3],
                "columns": shape[0],
                "rows": rows,
                "from": old,
                "to": changed[1].upper() if changed else old,
            }
        )
    return tensors


def _fallbacks(log: str) -> list[dict[str, Any]]:
    return [
        {"tensor": m[1], "columns": int(m[2]), "block": int(m[3]), "wanted": m[4].upper(), "used": m[5].upper()}
        for m in map(_FALLBACK.search, log.splitlines())
        if m is not None
    ]


def _refusal(log: str) -> EngineError | BadFile:
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    reason = next(
        (line for line in reversed(lines) if "failed to quantize" in line), lines[-1] if lines else "no reason given"
    )
    reason = printable(reason.partition("failed to quantize: ")[2] or reason, limit=300)
    if "iostream" in reason or "basic_ios" in reason:
        return EngineError(
            "writing the result failed: the disk is full or the file may not grow", "free some space and try again"
        )
    if bad := re.search(r"tensor '(.+)' has invalid data|data validation failed", reason):
        named = re.findall(r"\[ *\d+/ *\d+\] (\S+)", log)
        name = bad[1] or (named[-1] if named else "?")
        return BadFile(f"tensor '{printable(name)}' of the source holds NaN or infinity", "fetch or make it again")
    if "no tensor type fallback" in reason:
        return EngineError(f"the engine refused: {reason}", "choose another type: some rows do not divide into blocks")
    return EngineError(f"the engine refused: {reason}")


def _headers(options: Options, types: Mapping[str, str]) -> list[bytes]:
    """Each output file's header: the steps of `llama_model_quantize_impl`, on the same writer."""
    shards = [_Gguf(path) for path in options["shards"]]
    # One output file: the order of the log. Split output: the order of the source.
    groups = [shard.names() for shard in shards] if options["keep_split"] else [list(types)]
    headers = []
    for index, names in enumerate(groups):
        out = _Gguf()
        if index == 0:
            out.set_header(shards[0], options)
        if len(groups) > 1:
            out.set_split(index, len(groups), len(types))
        for name in names:
            out.add(next(shard for shard in shards if shard.has(name)), name, ggml_type(types[name]).id)
        headers.append(out.header())
    return headers


class _Gguf:
    """A `gguf_context`, read from a file or empty. Lives as long as the child."""

    def __init__(self, path: str = "") -> None:
        self._lib = start().base
        self._tensors = ctypes.c_void_p()
        if path:
            parameters = GgufInitParams(True, ctypes.pointer(self._tensors))
            self._handle = self._lib.gguf_init_from_file(path.encode(), parameters)
            if not self._handle:
                raise BadFile(f"{printable(path)} has a header that the engine cannot read")
        else:
            self._handle = self._lib.gguf_init_empty()

    def names(self) -> list[str]:
        count = self._lib.gguf_get_n_tensors(self._handle)
        return [self._lib.gguf_get_tensor_name(self._handle, i).decode() for i in range(count)]

    def has(self, name: str) -> bool:
        return bool(self._lib.gguf_find_tensor(self._handle, name.encode()) >= 0)

    def set_header(self, source: _Gguf, options: Options) -> None:
        self._lib.gguf_set_kv(self._handle, source._handle)
        self._u32(b"general.quantization_version", 2)
        self._u32(b"general.file_type", options["file_type"])
        for key in _SPLIT_KEYS:
            self._lib.gguf_remove_key(self._handle, key)
        for name, value in options["metadata"].items():
            if isinstance(value, int):
                self._u32(name.encode(), value)
            else:
                self._lib.gguf_set_val_str(self._handle, name.encode(), value.encode())

    def set_split(self, number: int, count: int, tensors: int) -> None:
        for key, value in zip(_SPLIT_KEYS, (number, count), strict=False):
            self._lib.gguf_set_val_u16(self._handle, key, value)
        self._lib.gguf_set_val_i32(self._handle, _SPLIT_KEYS[2], tensors)

    def add(self, source: _Gguf, name: str, type_id: int) -> None:
        tensor = self._lib.ggml_get_tensor(source._tensors, name.encode())
        self._lib.gguf_add_tensor(self._handle, tensor)
        self._lib.gguf_set_tensor_type(self._handle, name.encode(), type_id)

    def header(self) -> bytes:
        size = int(self._lib.gguf_get_meta_size(self._handle))
        data = ctypes.create_string_buffer(size)
        self._lib.gguf_get_meta_data(self._handle, data)
        return data.raw

    def _u32(self, key: bytes, value: int) -> None:
        self._lib.gguf_set_val_u32(self._handle, key, value)
