"""What the binding lacks of ggml.h, ggml-backend.h and gguf.h (ggml-base, ggml), ggml-cpu.h (ggml-cpu), ggml-rpc.h."""

from __future__ import annotations

from ctypes import (
    CFUNCTYPE,
    POINTER,
    Structure,
    c_bool,
    c_char,
    c_char_p,
    c_float,
    c_int,
    c_int32,
    c_int64,
    c_size_t,
    c_uint8,
    c_uint16,
    c_uint32,
    c_void_p,
)

from . import Table

DEVICE_TYPES = {0: "cpu", 1: "gpu", 2: "igpu", 3: "accel"}  # enum ggml_backend_dev_type
_DIMS, _OP_PARAMS, _SOURCES, _NAME = 4, 16, 10, 64  # GGML_MAX_DIMS, _OP_PARAMS / 4, _SRC, _NAME

# typedef void (*ggml_abort_callback_t)(const char * error_message);
AbortCallback = CFUNCTYPE(None, c_char_p)
# typedef void (*ggml_to_float_t)(const void * x, float * y, int64_t k);
ToFloat = CFUNCTYPE(None, c_void_p, c_void_p, c_int64)
# typedef void (*ggml_backend_set_n_threads_t)(ggml_backend_t backend, int n_threads);
SetThreads = CFUNCTYPE(None, c_void_p, c_int)
# typedef ggml_backend_buffer_type_t * (*ggml_backend_dev_get_extra_bufts_t)(ggml_backend_dev_t device);
ExtraBufferTypes = CFUNCTYPE(POINTER(c_void_p), c_void_p)


class InitParams(Structure):
    """struct ggml_init_params."""

    _fields_ = (("mem_size", c_size_t), ("mem_buffer", c_void_p), ("no_alloc", c_bool))


class GgufInitParams(Structure):
    """struct gguf_init_params."""

    _fields_ = (("no_alloc", c_bool), ("ctx", POINTER(c_void_p)))


class TypeTraits(Structure):
    """struct ggml_type_traits."""

    _fields_ = (
        ("type_name", c_char_p),
        ("blck_size", c_int64),
        ("blck_size_interleave", c_int64),
        ("type_size", c_size_t),
        ("is_quantized", c_bool),
        ("to_float", ToFloat),
        ("from_float_ref", c_void_p),
    )


class Tensor(Structure):
    """struct ggml_tensor; a test compares it with tensors that the engine makes."""


Tensor._fields_ = (
    ("type", c_int),
    ("buffer", c_void_p),
    ("ne", c_int64 * _DIMS),
    ("nb", c_size_t * _DIMS),
    ("op", c_int),
    ("op_params", c_int32 * _OP_PARAMS),
    ("flags", c_int32),
    ("src", POINTER(Tensor) * _SOURCES),
    ("view_src", c_void_p),
    ("view_offs", c_size_t),
    ("data", c_void_p),
    ("name", c_char * _NAME),
    ("extra", c_void_p),
    ("padding", c_char * 8),
)


# fmt: off
VERSION: Table = {  # ggml-base
    # const char * ggml_version(void);
    "ggml_version": (c_char_p, ()),
}
BASE: Table = {  # ggml-base: devices and buffers
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
GRAPHS: Table = {  # ggml-base: tensors, graphs and where they lie
    # struct ggml_context * ggml_init(struct ggml_init_params params);
    "ggml_init": (c_void_p, (InitParams,)),
    # void ggml_free(struct ggml_context * ctx);
    "ggml_free": (None, (c_void_p,)),
    # size_t ggml_tensor_overhead(void);
    "ggml_tensor_overhead": (c_size_t, ()),
    # size_t ggml_graph_overhead_custom(size_t size, bool grads);
    "ggml_graph_overhead_custom": (c_size_t, (c_size_t, c_bool)),
    # struct ggml_tensor * ggml_new_tensor_4d(ctx, enum ggml_type type, int64_t ne0, ne1, ne2, ne3);
    "ggml_new_tensor_4d": (c_void_p, (c_void_p, c_int, c_int64, c_int64, c_int64, c_int64)),
    # struct ggml_tensor * ggml_permute(ctx, struct ggml_tensor * a, int axis0, axis1, axis2, axis3);
    "ggml_permute": (c_void_p, (c_void_p, c_void_p, c_int, c_int, c_int, c_int)),
    # struct ggml_tensor * ggml_mul_mat(ctx, struct ggml_tensor * a, struct ggml_tensor * b);
    "ggml_mul_mat": (c_void_p, (c_void_p, c_void_p, c_void_p)),
    # struct ggml_tensor * ggml_add(ctx, struct ggml_tensor * a, struct ggml_tensor * b);
    "ggml_add": (c_void_p, (c_void_p, c_void_p, c_void_p)),
    # struct ggml_tensor * ggml_flash_attn_ext(ctx, q, k, v, mask, float scale, float max_bias, float logit_softcap);
    "ggml_flash_attn_ext": (c_void_p, (c_void_p, c_void_p, c_void_p, c_void_p, c_void_p, c_float, c_float, c_float)),
    # struct ggml_cgraph * ggml_new_graph_custom(ctx, size_t size, bool grads);
    "ggml_new_graph_custom": (c_void_p, (c_void_p, c_size_t, c_bool)),
    # void ggml_build_forward_expand(struct ggml_cgraph * cgraph, struct ggml_tensor * tensor);
    "ggml_build_forward_expand": (None, (c_void_p, c_void_p)),
    # ggml_backend_t ggml_backend_dev_init(ggml_backend_dev_t device, const char * params);
    "ggml_backend_dev_init": (c_void_p, (c_void_p, c_char_p)),
    # void ggml_backend_free(ggml_backend_t backend);
    "ggml_backend_free": (None, (c_void_p,)),
    # enum ggml_status ggml_backend_graph_compute(ggml_backend_t backend, struct ggml_cgraph * cgraph);
    "ggml_backend_graph_compute": (c_int, (c_void_p, c_void_p)),
    # ggml_backend_reg_t ggml_backend_dev_backend_reg(ggml_backend_dev_t device);
    "ggml_backend_dev_backend_reg": (c_void_p, (c_void_p,)),
    # void * ggml_backend_reg_get_proc_address(ggml_backend_reg_t reg, const char * name);
    "ggml_backend_reg_get_proc_address": (c_void_p, (c_void_p, c_char_p)),
    # bool ggml_backend_dev_supports_op(ggml_backend_dev_t device, const struct ggml_tensor * op);
    "ggml_backend_dev_supports_op": (c_bool, (c_void_p, c_void_p)),
    # ggml_backend_buffer_type_t ggml_backend_dev_host_buffer_type(ggml_backend_dev_t device);
    "ggml_backend_dev_host_buffer_type": (c_void_p, (c_void_p,)),
    # ggml_backend_buffer_t ggml_backend_buft_alloc_buffer(ggml_backend_buffer_type_t buft, size_t size);
    "ggml_backend_buft_alloc_buffer": (c_void_p, (c_void_p, c_size_t)),
    # void * ggml_backend_buffer_get_base(ggml_backend_buffer_t buffer);
    "ggml_backend_buffer_get_base": (c_void_p, (c_void_p,)),
    # void ggml_backend_buffer_clear(ggml_backend_buffer_t buffer, uint8_t value);
    "ggml_backend_buffer_clear": (None, (c_void_p, c_uint8)),
    # void ggml_backend_buffer_free(ggml_backend_buffer_t buffer);
    "ggml_backend_buffer_free": (None, (c_void_p,)),
    # ggml_backend_buffer_t ggml_backend_alloc_ctx_tensors_from_buft(ctx, ggml_backend_buffer_type_t buft);
    "ggml_backend_alloc_ctx_tensors_from_buft": (c_void_p, (c_void_p, c_void_p)),
    # size_t ggml_quantize_chunk(type, const float * src, void * dst, start, nrows, n_per_row, const float * imatrix);
    "ggml_quantize_chunk": (c_size_t, (c_int, c_void_p, c_void_p, c_int64, c_int64, c_int64, c_void_p)),
    # void * ggml_get_data(const struct ggml_tensor * tensor);
    "ggml_get_data": (c_void_p, (c_void_p,)),
    # size_t ggml_nbytes(const struct ggml_tensor * tensor);
    "ggml_nbytes": (c_size_t, (c_void_p,)),
    # void ggml_backend_tensor_set(struct ggml_tensor * tensor, const void * data, size_t offset, size_t size);
    "ggml_backend_tensor_set": (None, (c_void_p, c_void_p, c_size_t, c_size_t)),
    # void ggml_backend_tensor_get(const struct ggml_tensor * tensor, void * data, size_t offset, size_t size);
    "ggml_backend_tensor_get": (None, (c_void_p, c_void_p, c_size_t, c_size_t)),
    # void ggml_fp32_to_bf16_row_ref(const float * x, ggml_bf16_t * y, int64_t n);
    "ggml_fp32_to_bf16_row_ref": (None, (c_void_p, c_void_p, c_int64)),
    # void ggml_flash_attn_ext_add_sinks(struct ggml_tensor * a, struct ggml_tensor * sinks);
    "ggml_flash_attn_ext_add_sinks": (None, (c_void_p, c_void_p)),
    # struct ggml_cgraph * ggml_new_graph(struct ggml_context * ctx);
    "ggml_new_graph": (c_void_p, (c_void_p,)),
    # const char * ggml_op_name(enum ggml_op op);
    "ggml_op_name": (c_char_p, (c_int,)),
    # const struct ggml_type_traits * ggml_get_type_traits(enum ggml_type type);
    "ggml_get_type_traits": (POINTER(TypeTraits), (c_int,)),
    # struct ggml_tensor * ggml_get_tensor(struct ggml_context * ctx, const char * name);
    "ggml_get_tensor": (c_void_p, (c_void_p, c_char_p)),
    # bool ggml_backend_buffer_is_host(ggml_backend_buffer_t buffer);
    "ggml_backend_buffer_is_host": (c_bool, (c_void_p,)),
}
GGUF: Table = {  # ggml-base: files
    # struct gguf_context * gguf_init_from_file(const char * fname, struct gguf_init_params params);
    "gguf_init_from_file": (c_void_p, (c_char_p, GgufInitParams)),
    # struct gguf_context * gguf_init_empty(void);
    "gguf_init_empty": (c_void_p, ()),
    # int64_t gguf_get_n_tensors(const struct gguf_context * ctx);
    "gguf_get_n_tensors": (c_int64, (c_void_p,)),
    # const char * gguf_get_tensor_name(const struct gguf_context * ctx, int64_t tensor_id);
    "gguf_get_tensor_name": (c_char_p, (c_void_p, c_int64)),
    # int64_t gguf_find_tensor(const struct gguf_context * ctx, const char * name);
    "gguf_find_tensor": (c_int64, (c_void_p, c_char_p)),
    # void gguf_set_kv(struct gguf_context * ctx, const struct gguf_context * src);
    "gguf_set_kv": (None, (c_void_p, c_void_p)),
    # int64_t gguf_remove_key(struct gguf_context * ctx, const char * key);
    "gguf_remove_key": (c_int64, (c_void_p, c_char_p)),
    # void gguf_set_val_str(struct gguf_context * ctx, const char * key, const char * val);
    "gguf_set_val_str": (None, (c_void_p, c_char_p, c_char_p)),
    # void gguf_set_val_u16(struct gguf_context * ctx, const char * key, uint16_t val);
    "gguf_set_val_u16": (None, (c_void_p, c_char_p, c_uint16)),
    # void gguf_set_val_u32(struct gguf_context * ctx, const char * key, uint32_t val);
    "gguf_set_val_u32": (None, (c_void_p, c_char_p, c_uint32)),
    # void gguf_set_val_i32(struct gguf_context * ctx, const char * key, int32_t val);
    "gguf_set_val_i32": (None, (c_void_p, c_char_p, c_int32)),
    # void gguf_add_tensor(struct gguf_context * ctx, const struct ggml_tensor * tensor);
    "gguf_add_tensor": (None, (c_void_p, c_void_p)),
    # void gguf_set_tensor_type(struct gguf_context * ctx, const char * name, enum ggml_type type);
    "gguf_set_tensor_type": (None, (c_void_p, c_char_p, c_int)),
    # size_t gguf_get_meta_size(const struct gguf_context * ctx);
    "gguf_get_meta_size": (c_size_t, (c_void_p,)),
    # void gguf_get_meta_data(const struct gguf_context * ctx, void * data);
    "gguf_get_meta_data": (None, (c_void_p, c_void_p)),
}
REGISTRY: Table = {  # ggml
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
CPU: Table = {  # ggml-cpu
    # ggml_backend_t ggml_backend_cpu_init(void);
    "ggml_backend_cpu_init": (c_void_p, ()),
    # void ggml_backend_cpu_set_n_threads(ggml_backend_t backend_cpu, int n_threads);
    "ggml_backend_cpu_set_n_threads": (None, (c_void_p, c_int)),
}
RPC: Table = {  # ggml or ggml-rpc
    # ggml_backend_reg_t ggml_backend_rpc_add_server(const char * endpoint);
    "ggml_backend_rpc_add_server": (c_void_p, (c_char_p,)),
    # void ggml_backend_rpc_start_server(const char * endpoint, const char * cache_dir, size_t n_threads,
    #                                    size_t n_devices, ggml_backend_dev_t * devices);
    "ggml_backend_rpc_start_server": (None, (c_char_p, c_char_p, c_size_t, c_size_t, POINTER(c_void_p))),
}
# fmt: on
