"""ctypes declarations that the binding lacks, each under its C line (ggml-backend.h, ggml-rpc.h, hg.h, hg-api.h).

Knows no policy: `declare` only gives functions their types. Functions of hg.h and hg-api.h exist in our engine alone.
"""

from __future__ import annotations

import ctypes
from ctypes import CFUNCTYPE, POINTER, Structure, c_bool, c_char, c_char_p, c_int, c_int32, c_size_t, c_uint64, c_void_p

DEVICE_TYPES = {0: "cpu", 1: "gpu", 2: "igpu", 3: "accel"}  # enum ggml_backend_dev_type


# typedef void (*ggml_abort_callback_t)(const char * error_message);
AbortCallback = CFUNCTYPE(None, c_char_p)


class MemoryEntry(Structure):
    """struct hg_memory_entry (include/hg-api.h)."""

    _fields_ = (
        ("buffer_type", c_char * 64),
        ("device", c_char * 64),
        ("model", c_uint64),
        ("context", c_uint64),
        ("compute", c_uint64),
        ("is_host", c_int32),
        ("reserved", c_int32),
    )


# fmt: off
_BASE: dict[str, tuple[object, tuple[object, ...]]] = {
    # const char * ggml_version(void);
    "ggml_version": (c_char_p, ()),
    # ggml_abort_callback_t ggml_set_abort_callback(ggml_abort_callback_t callback);
    "ggml_set_abort_callback": (c_void_p, (AbortCallback,)),
    # const char * ggml_backend_dev_name(ggml_backend_dev_t device);
    "ggml_backend_dev_name": (c_char_p, (c_void_p,)),
    # const char * ggml_backend_dev_description(ggml_backend_dev_t device);
    "ggml_backend_dev_description": (c_char_p, (c_void_p,)),
    # void ggml_backend_dev_memory(ggml_backend_dev_t device, size_t * free, size_t * total);
    "ggml_backend_dev_memory": (None, (c_void_p, POINTER(c_size_t), POINTER(c_size_t))),
    # enum ggml_backend_dev_type ggml_backend_dev_type(ggml_backend_dev_t device);
    "ggml_backend_dev_type": (c_int, (c_void_p,)),
    # ggml_backend_buffer_type_t ggml_backend_dev_buffer_type(ggml_backend_dev_t device);
    "ggml_backend_dev_buffer_type": (c_void_p, (c_void_p,)),
    # const char * ggml_backend_buft_name(ggml_backend_buffer_type_t buft);
    "ggml_backend_buft_name": (c_char_p, (c_void_p,)),
    # const char * ggml_backend_reg_name(ggml_backend_reg_t reg);
    "ggml_backend_reg_name": (c_char_p, (c_void_p,)),
}
_REGISTRY: dict[str, tuple[object, tuple[object, ...]]] = {
    # size_t ggml_backend_reg_count(void);
    "ggml_backend_reg_count": (c_size_t, ()),
    # ggml_backend_reg_t ggml_backend_reg_get(size_t index);
    "ggml_backend_reg_get": (c_void_p, (c_size_t,)),
    # size_t ggml_backend_dev_count(void);
    "ggml_backend_dev_count": (c_size_t, ()),
    # ggml_backend_dev_t ggml_backend_dev_get(size_t index);
    "ggml_backend_dev_get": (c_void_p, (c_size_t,)),
    # ggml_backend_dev_t ggml_backend_dev_by_name(const char * name);
    "ggml_backend_dev_by_name": (c_void_p, (c_char_p,)),
    # void ggml_backend_register(ggml_backend_reg_t reg);
    "ggml_backend_register": (None, (c_void_p,)),
}
_RPC: dict[str, tuple[object, tuple[object, ...]]] = {
    # ggml_backend_reg_t ggml_backend_rpc_add_server(const char * endpoint);
    "ggml_backend_rpc_add_server": (c_void_p, (c_char_p,)),
    # void ggml_backend_rpc_start_server(const char * endpoint, const char * cache_dir, size_t n_threads,
    #                                    size_t n_devices, ggml_backend_dev_t * devices);
    "ggml_backend_rpc_start_server": (None, (c_char_p, c_char_p, c_size_t, c_size_t, POINTER(c_void_p))),
}
_HG_BASE: dict[str, tuple[object, tuple[object, ...]]] = {
    # const char * hg_commit(void);
    "hg_commit": (c_char_p, ()),
    # const char * hg_patches(void);
    "hg_patches": (c_char_p, ()),
    # const char * hg_switch_name(int i);
    "hg_switch_name": (c_char_p, (c_int,)),
    # const char * hg_switch_values(int i);
    "hg_switch_values": (c_char_p, (c_int,)),
    # const char * hg_switch_get(const char * name);
    "hg_switch_get": (c_char_p, (c_char_p,)),
    # bool hg_switch_set(const char * name, const char * value);
    "hg_switch_set": (c_bool, (c_char_p, c_char_p)),
}
_HG_LLAMA: dict[str, tuple[object, tuple[object, ...]]] = {
    # int32_t hg_memory(const struct llama_context * ctx, struct hg_memory_entry * entries, int32_t capacity);
    "hg_memory": (c_int32, (c_void_p, POINTER(MemoryEntry), c_int32)),
    # const char * hg_layer_device(const struct llama_model * model, int32_t il);
    "hg_layer_device": (c_char_p, (c_void_p, c_int32)),
}
# fmt: on


def declare(library: ctypes.CDLL, table: dict[str, tuple[object, tuple[object, ...]]]) -> bool:
    """Gives the functions of `table` their types. False when the library lacks one of them."""
    for name, (result, arguments) in table.items():
        function = getattr(library, name, None)
        if function is None:
            return False
        function.restype = result
        function.argtypes = arguments
    return True


def declare_base(library: ctypes.CDLL) -> bool:
    return declare(library, _BASE)


def declare_registry(library: ctypes.CDLL) -> bool:
    return declare(library, _REGISTRY)


def declare_rpc(library: ctypes.CDLL) -> bool:
    return declare(library, _RPC)


def declare_identity(base: ctypes.CDLL) -> bool:
    """True when ggml-base is ours and can say so."""
    return declare(base, _HG_BASE)


def declare_hg(base: ctypes.CDLL, llama: ctypes.CDLL) -> bool:
    return declare_identity(base) and declare(llama, _HG_LLAMA)
