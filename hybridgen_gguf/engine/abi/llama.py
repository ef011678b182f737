"""What the binding does not declare, or declares on its own handle, of llama.h (libllama)."""

from __future__ import annotations

from ctypes import POINTER, Structure, c_bool, c_char_p, c_float, c_int32, c_uint32, c_void_p

from . import Table


class TensorOverride(Structure):
    """struct llama_model_tensor_buft_override."""

    _fields_ = (("pattern", c_char_p), ("buffer_type", c_void_p))


class ChainParams(Structure):
    """struct llama_sampler_chain_params."""

    _fields_ = (("no_perf", c_bool),)


# fmt: off
SAMPLERS: Table = {
    # struct llama_sampler * llama_sampler_chain_init(struct llama_sampler_chain_params params);
    "llama_sampler_chain_init": (c_void_p, (ChainParams,)),
    # void llama_sampler_chain_add(struct llama_sampler * chain, struct llama_sampler * smpl);
    "llama_sampler_chain_add": (None, (c_void_p, c_void_p)),
    # void llama_sampler_free(struct llama_sampler * smpl);
    "llama_sampler_free": (None, (c_void_p,)),
    # bool llama_set_sampler(struct llama_context * ctx, llama_seq_id seq_id, struct llama_sampler * smpl);
    "llama_set_sampler": (c_bool, (c_void_p, c_int32, c_void_p)),
    # uint32_t llama_get_sampled_logits_count_ith(struct llama_context * ctx, int32_t i);
    "llama_get_sampled_logits_count_ith": (c_uint32, (c_void_p, c_int32)),
    # float * llama_get_sampled_logits_ith(struct llama_context * ctx, int32_t i);
    "llama_get_sampled_logits_ith": (POINTER(c_float), (c_void_p, c_int32)),
    # float * llama_get_sampled_probs_ith(struct llama_context * ctx, int32_t i);
    "llama_get_sampled_probs_ith": (POINTER(c_float), (c_void_p, c_int32)),
    # llama_token * llama_get_sampled_candidates_ith(struct llama_context * ctx, int32_t i);
    "llama_get_sampled_candidates_ith": (POINTER(c_int32), (c_void_p, c_int32)),
}
# fmt: on
