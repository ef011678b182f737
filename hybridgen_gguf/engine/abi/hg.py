"""What our patches add: hg.h (ggml-base), hg-attention.h (ggml-cpu), hg-api.h, hg-sample.h, hg-tiers.h (libllama)."""

from __future__ import annotations

from ctypes import (
    POINTER,
    Structure,
    c_bool,
    c_char,
    c_char_p,
    c_double,
    c_float,
    c_int,
    c_int32,
    c_size_t,
    c_uint32,
    c_uint64,
    c_void_p,
)

from . import Table


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


class SampleKey(Structure):
    """struct hg_sample_key (include/hg-sample.h)."""

    _fields_ = (("seed", c_uint64), ("stream", c_uint64), ("position", c_uint64))


class SampleRow(Structure):
    """struct hg_sample_row (include/hg-sample.h)."""

    _fields_ = (
        ("key", SampleKey),
        ("logits", c_void_p),
        ("top_p", c_double),
        ("log_min_p", c_double),
        ("temperature", c_double),
        ("top_k", c_int32),
        ("token", c_int32),
    )


class KvTiers(Structure):
    """struct hg_kv_tiers (include/hg-tiers.h)."""

    _fields_ = (
        ("cells_device", c_uint32),
        ("type_k_host", c_int32),
        ("type_v_host", c_int32),
        ("policy", c_int32),
        ("sinks", c_uint32),
        ("block", c_uint32),
        ("cpu_tokens", c_int32),
        ("pinned", c_int32),
        ("share", c_uint32),
    )


class KvCounters(Structure):
    """struct hg_kv_counters (include/hg-tiers.h)."""

    _fields_ = (
        ("steps", c_uint64),
        ("steps_tiered", c_uint64),
        ("steps_streamed", c_uint64),
        ("tokens", c_uint64),
        ("bytes_device", c_uint64),
        ("bytes_host", c_uint64),
        ("bytes_streamed", c_uint64),
        ("bytes_moved", c_uint64),
        ("ns_cpu", c_uint64),
        ("ns_wait", c_uint64),
        ("head_starts", c_uint64),
        ("cells_device", c_uint32),
        ("cells_host", c_uint32),
        ("size_device", c_uint32),
        ("size_host", c_uint32),
        ("size_host_bytes", c_uint64),
        ("pinned", c_uint32),
        ("huge_pages", c_uint32),
        ("stores_sent", c_uint64),
    )


# fmt: off
IDENTITY: Table = {  # ggml-base
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
API: Table = {  # libllama
    # int32_t hg_memory(const struct llama_context * ctx, struct hg_memory_entry * entries, int32_t capacity);
    "hg_memory": (c_int32, (c_void_p, POINTER(MemoryEntry), c_int32)),
    # const char * hg_layer_device(const struct llama_model * model, int32_t il);
    "hg_layer_device": (c_char_p, (c_void_p, c_int32)),
}
SAMPLE: Table = {  # libllama
    # int32_t hg_sample_top(const float * logits, int32_t n, int32_t k, int32_t want_lse,
    #                       int32_t * ids, float * values, double * rest);
    "hg_sample_top": (c_int32, (c_void_p, c_int32, c_int32, c_int32, c_void_p, c_void_p, c_void_p)),
    # int32_t hg_sample_best_of_all(const struct hg_sample_key * key, const float * logits, int32_t n,
    #                               double temperature, int32_t k, int32_t * ids, double * keys);
    "hg_sample_best_of_all": (c_int32, (POINTER(SampleKey), c_void_p, c_int32, c_double, c_int32, c_void_p, c_void_p)),
    # int32_t hg_sample_best_of(const struct hg_sample_key * key, const int64_t * tokens, const double * scores,
    #                           int32_t n, int32_t k, int32_t * ids, double * keys);
    "hg_sample_best_of": (c_int32, (POINTER(SampleKey), c_void_p, c_void_p, c_int32, c_int32, c_void_p, c_void_p)),
    # int32_t hg_sample_chain(const struct hg_sample_key * key, const float * logits, int32_t n, int32_t top_k,
    #                         double top_p, double log_min_p, double temperature);
    "hg_sample_chain": (c_int32, (POINTER(SampleKey), c_void_p, c_int32, c_int32, c_double, c_double, c_double)),
    # void hg_sample_rows(struct hg_sample_row * rows, int32_t n_rows, int32_t n, int32_t n_threads);
    "hg_sample_rows": (None, (POINTER(SampleRow), c_int32, c_int32, c_int32)),
    # double hg_sample_exp_total(const float * logits, int32_t n, float largest);
    "hg_sample_exp_total": (c_double, (c_void_p, c_int32, c_float)),
    # void hg_sample_noise(const struct hg_sample_key * key, const int64_t * tokens, int32_t n, double * noise);
    "hg_sample_noise": (None, (POINTER(SampleKey), c_void_p, c_int32, c_void_p)),
}
SAMPLE_DEVICE: Table = {  # libllama
    # struct llama_sampler * hg_sampler_init_top(int32_t k, int32_t want_probs);
    "hg_sampler_init_top": (c_void_p, (c_int32, c_int32)),
    # bool hg_sample_fetch_logits(struct llama_context * ctx, int32_t i, float * out);
    "hg_sample_fetch_logits": (c_bool, (c_void_p, c_int32, c_void_p)),
}
GRAMMAR: Table = {  # libllama
    # struct hg_grammar * hg_grammar_init(const struct llama_vocab * vocab, const char * text, const char * root,
    #                                     char * error, size_t size);
    "hg_grammar_init": (c_void_p, (c_void_p, c_char_p, c_char_p, c_char_p, c_size_t)),
    # void hg_grammar_free(struct hg_grammar * grammar);
    "hg_grammar_free": (None, (c_void_p,)),
    # int32_t hg_grammar_allowed(struct hg_grammar * grammar, const int32_t * ids, int32_t n, uint8_t * allowed);
    "hg_grammar_allowed": (c_int32, (c_void_p, c_void_p, c_int32, c_void_p)),
    # int32_t hg_grammar_accept(struct hg_grammar * grammar, llama_token token);
    "hg_grammar_accept": (c_int32, (c_void_p, c_int32)),
    # int32_t hg_grammar_accept_text(struct hg_grammar * grammar, const char * text);
    "hg_grammar_accept_text": (c_int32, (c_void_p, c_char_p)),
    # bool hg_grammar_finished(const struct hg_grammar * grammar);
    "hg_grammar_finished": (c_bool, (c_void_p,)),
    # int32_t hg_json_schema_to_grammar(const char * schema, char * out, size_t size);
    "hg_json_schema_to_grammar": (c_int32, (c_char_p, c_char_p, c_size_t)),
}
TIERS: Table = {  # libllama
    # void hg_set_kv_tiers(const struct hg_kv_tiers * tiers);
    "hg_set_kv_tiers": (None, (POINTER(KvTiers),)),
    # const char * hg_kv_tiers_message(void);
    "hg_kv_tiers_message": (c_char_p, ()),
    # bool hg_get_kv_counters(const struct llama_context * ctx, struct hg_kv_counters * out);
    "hg_get_kv_counters": (c_bool, (c_void_p, POINTER(KvCounters))),
    # bool hg_kv_set_cpu_tokens(struct llama_context * ctx, int32_t cpu_tokens);
    "hg_kv_set_cpu_tokens": (c_bool, (c_void_p, c_int32)),
}
ATTENTION: Table = {  # ggml-cpu
    # const char * hg_attention_isa(void);
    "hg_attention_isa": (c_char_p, ()),
    # double hg_read_bandwidth(int n_threads, size_t n_bytes, int n_repeats);
    "hg_read_bandwidth": (c_double, (c_int, c_size_t, c_int)),
}
# fmt: on
