"""Changes to a model while it is opened: adapters, values of its file, rotary positions, in the engine's terms.

Knows the structs of the binding; which changes make sense was checked before. Invariant: what is None or absent leaves
the engine's parameters as they are.
"""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ..errors import EngineError, UsageError
from ..model_file.adapter import adapter_pairs
from ..settings import ROPE_SCALING, Adapter, BufferBytes, ModelSettings, Override, Rope
from . import log

if TYPE_CHECKING:
    from .handles import Model

_TAGS = {int: 0, float: 1, bool: 2, str: 3}  # enum llama_model_kv_override_type
_FIELDS = {int: "val_i64", float: "val_f64", bool: "val_bool", str: "val_str"}
_ROPE_FIELDS = {
    "freq_base": "rope_freq_base", "freq_scale": "rope_freq_scale", "orig_ctx": "yarn_orig_ctx",
    "ext_factor": "yarn_ext_factor", "attn_factor": "yarn_attn_factor", "beta_slow": "yarn_beta_slow",
    "beta_fast": "yarn_beta_fast",
}  # fmt: skip
_USED = re.compile(r"Using metadata override \([^)]*\) '([^']*)'")
_BAD = re.compile(r"Bad metadata override type for key '([^']*)', expected (\w+) but got (\w+)")


def override_array(api: Any, overrides: Sequence[Override]) -> Any:
    """llama_model_kv_override[], ended by an empty key."""
    array = (api.llama_model_kv_override * (len(overrides) + 1))()
    for row, override in zip(array, overrides, strict=False):
        kind, value = type(override.value), override.value
        row.tag, row.key = _TAGS[kind], override.key.encode()
        setattr(row.value, _FIELDS[kind], value.encode() if isinstance(value, str) else value)
    return array


def overridden(overrides: Sequence[Override]) -> tuple[str, ...]:
    """The keys that the loader said it used. Raises UsageError for a value of another type than it takes."""
    if not overrides:
        return ()
    told = "\n".join(log.overrides)
    if bad := _BAD.search(told):
        raise UsageError(f"--override-kv {bad[1]} takes a value of type {bad[2]}, not {bad[3]}", "give that type")
    return tuple(dict.fromkeys(_USED.findall(told)))


def set_rope(parameters: Any, rope: Rope) -> None:
    """Into llama_context_params."""
    if rope.scaling is not None:
        parameters.rope_scaling_type = ROPE_SCALING[rope.scaling]
    for name, field in _ROPE_FIELDS.items():
        if (value := getattr(rope, name)) is not None:
            setattr(parameters, field, value)


def load_adapter(api: Any, model: Any, adapter: Adapter) -> Any:
    """An open adapter. Raises EngineError in the engine's words."""
    log.lines.clear()
    handle = api.llama_adapter_lora_init(model, os.fsencode(adapter.path))
    if not handle:
        raise EngineError(f"the engine cannot load the adapter {adapter.path}: {log.last_error()}")
    return handle


def set_adapters(api: Any, context: Any, model: Model) -> int:
    """All of the model's adapters with their scales; 0 when done."""
    count = len(model.adapters)
    scales = (ctypes.c_float * count)(*(adapter.scale for adapter in model.settings.adapters))
    handles = (api.llama_adapter_lora_p_ctypes * count)(*model.adapters)
    return int(api.llama_set_adapters_lora(context, handles, count, scales))


def adapter_bytes(settings: ModelSettings, devices: Sequence[str]) -> tuple[BufferBytes, ...]:
    """Bytes of the adapters, each pair where its weight lies. `devices`: of each layer, the output's last."""
    sums: dict[str, int] = {}
    for adapter in settings.adapters:
        for name, size in adapter_pairs(adapter.path).items():
            device = _device_of(name, settings, devices)
            sums[device] = sums.get(device, 0) + size
    return tuple(BufferBytes("adapter", device, device == "CPU", size, 0, 0) for device, size in sums.items())


def _device_of(name: str, settings: ModelSettings, devices: Sequence[str]) -> str:
    for pattern, buffer_type in settings.placement.patterns:
        if re.search(pattern, name):
            return buffer_type
    layer = re.match(r"blk\.(\d+)\.", name)
    if layer:
        return devices[min(int(layer[1]), len(devices) - 1)]
    return devices[-1] if name.startswith("output") else "CPU"
