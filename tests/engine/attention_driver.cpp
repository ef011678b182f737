// The attention kernels on their own, against F64: hg-attention.cpp with the few functions of ggml that it needs.
// Small enough to be compiled for every instruction set, by a cross compiler, and under the sanitizers: all tensors lie in
// allocations of exactly their size, so that reading past a row is seen.
// usage: attention_driver [SEED [CASES]]   prints the instruction set, the number of cases and the largest error; exit code 1 above the limit

#include "ggml-cpu-impl.h"
#include "hg-attention.h"
#include "hg.h"

#include <atomic>
#include <cmath>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <mutex>
#include <random>
#include <thread>
#include <vector>

// what ggml would provide ---------------------------------------------------------------------------------------------

struct ggml_threadpool {
    int n = 1, waiting = 0, round = 0;
    std::mutex lock;
    std::condition_variable ready;
    std::atomic<int> chunk{0};
};

static size_t block_bytes(ggml_type t) {
    return t == GGML_TYPE_F32 ? 4 : t == GGML_TYPE_Q8_0 ? 34 : t == GGML_TYPE_Q4_0 ? 18 : 2;
}
static int64_t block_size(ggml_type t) { return t == GGML_TYPE_Q8_0 || t == GGML_TYPE_Q4_0 ? 32 : 1; }

static float half_to_float(uint16_t h) {
    const int e = h >> 10 & 31, m = h & 1023;
    const float x = e == 31 ? (m ? NAN : INFINITY) : e ? std::ldexp((float) (m + 1024), e - 25) : std::ldexp((float) m, -24);
    return h & 0x8000 ? -x : x;
}

extern "C" {

// only for rotated host cells, which this driver does not make; the real one lies in ggml-base
void hg_hadamard(float *, int64_t, int64_t) {
    abort();
}
float  ggml_table_f32_f16[1 << 16];
size_t ggml_type_size(ggml_type t) { return block_bytes(t); }
size_t ggml_row_size(ggml_type t, int64_t n) { return block_bytes(t) * n / block_size(t); }
int    hg_switch_value(hg_switch) { return 0; }
void   ggml_threadpool_chunk_set(ggml_threadpool * p, int v) { p->chunk = v; }
int    ggml_threadpool_chunk_add(ggml_threadpool * p, int v) { return p->chunk.fetch_add(v); }
void   ggml_barrier(ggml_threadpool * p) {
    std::unique_lock<std::mutex> hold(p->lock);
    const int round = p->round;
    if (++p->waiting == p->n) {
        p->waiting = 0;
        p->round++;
        p->ready.notify_all();
    } else {
        p->ready.wait(hold, [&] { return p->round != round; });
    }
}
}

// random tensors ------------------------------------------------------------------------------------------------------

using Random = std::mt19937_64;

static int pick(Random & r, int low, int high) { return low + (int) (r() % (uint64_t) (high - low + 1)); }
static float normal(Random & r) { return std::normal_distribution<float>()(r); }

// a half between 2^-7 and 2, or with a small factor
static uint16_t random_half(Random & r, int top) { return (uint16_t) ((r() & 0x83FF) | (uint16_t) pick(r, top - 7, top) << 10); }

struct Store {
    std::unique_ptr<uint8_t[]> bytes;
    std::vector<double>        values; // what the bytes mean
    ggml_tensor                tensor = {};

    // [size, heads, cells, streams] in memory, seen as [size, cells, heads, streams]
    Store(Random & r, ggml_type type, int size, int heads, int cells, int streams) {
        const int64_t n = (int64_t) size * heads * cells * streams;
        bytes.reset(new uint8_t[ggml_row_size(type, n)]);
        values.resize(n);
        for (int64_t i = 0; i < n; i += block_size(type)) {
            fill(r, type, bytes.get() + i / block_size(type) * block_bytes(type), &values[i]);
        }
        tensor.type = type;
        tensor.data = bytes.get();
        const int64_t ne[4] = { size, cells, heads, streams };
        const size_t  row   = ggml_row_size(type, size);
        const size_t  nb[4] = { block_bytes(type), row * heads, row, row * heads * cells };
        for (int i = 0; i < 4; i++) {
            tensor.ne[i] = ne[i];
            tensor.nb[i] = nb[i];
        }
    }
    static void fill(Random & r, ggml_type type, uint8_t * b, double * x) {
        uint16_t h = random_half(r, 15);
        float    f = normal(r);
        switch (type) {
            case GGML_TYPE_F16:
                memcpy(b, &h, 2);
                *x = half_to_float(h);
                return;
            case GGML_TYPE_BF16: {
                uint32_t bits;
                memcpy(&bits, &f, 4);
                bits &= 0xFFFF0000u;
                h = (uint16_t) (bits >> 16);
                memcpy(b, &h, 2);
                memcpy(&f, &bits, 4);
                *x = f;
                return;
            }
            case GGML_TYPE_F32:
                memcpy(b, &f, 4);
                *x = f;
                return;
            default:
                break;
        }
        h = random_half(r, type == GGML_TYPE_Q8_0 ? 8 : 12);
        memcpy(b, &h, 2);
        for (int i = 0; i < 32; i++) {
            if (type == GGML_TYPE_Q8_0) {
                b[2 + i] = (uint8_t) r();
                x[i] = (double) half_to_float(h) * (int8_t) b[2 + i];
            } else {
                const int q = pick(r, 0, 15);
                b[2 + i % 16] = (uint8_t) (i < 16 ? q : b[2 + i % 16] | q << 4);
                x[i] = (double) half_to_float(h) * (q - 8);
            }
        }
    }
};

struct Case {
    ggml_type type_k, type_v;
    int size, size_v, heads, kv_heads, cells, tokens, streams, threads;
    bool  masked, per_head, sinks;
    float holes, softcap, max_bias;
};

static Case random_case(Random & r) {
    static const ggml_type types[] = { GGML_TYPE_F16, GGML_TYPE_BF16, GGML_TYPE_F32, GGML_TYPE_Q8_0, GGML_TYPE_Q4_0 };
    static const int sizes[] = { 32, 64, 96, 128, 160, 256 }, plain[] = { 16, 48, 80, 112, 176 };
    Case c;
    c.type_k = types[pick(r, 0, 4)];
    c.type_v = types[pick(r, 0, 4)];
    const bool quantized = block_size(c.type_k) > 1 || block_size(c.type_v) > 1;
    c.size   = quantized || pick(r, 0, 1) ? sizes[pick(r, 0, 5)] : plain[pick(r, 0, 4)];
    c.size_v = pick(r, 0, 2) ? c.size : sizes[pick(r, 0, 5)];
    c.kv_heads = pick(r, 1, 3);
    c.heads    = c.kv_heads * pick(r, 1, 9);
    c.cells    = pick(r, 0, 3) ? pick(r, 1, 140) : pick(r, 141, 700);
    c.tokens   = pick(r, 0, 2) ? pick(r, 1, 8) : pick(r, 9, 40);
    c.streams  = pick(r, 0, 2) ? 1 : pick(r, 2, 3);
    c.threads  = pick(r, 1, 5);
    c.masked   = pick(r, 0, 3) != 0;
    c.per_head = pick(r, 0, 4) == 0;
    c.sinks    = pick(r, 0, 3) == 0;
    c.holes    = (float) pick(r, 0, 4) * 0.25f;
    c.softcap  = pick(r, 0, 3) ? 0.0f : 20.0f;
    c.max_bias = c.masked && pick(r, 0, 3) == 0 ? 8.0f : 0.0f;
    return c;
}

static double slope(const Case & c, int head) {
    if (c.max_bias <= 0) {
        return 1.0;
    }
    const int n = 1 << (int) std::floor(std::log2(c.heads));
    return head < n ? std::pow(2.0, -c.max_bias / n * (head + 1)) : std::pow(2.0, -c.max_bias / 2 / n * (2 * (head - n) + 1));
}

// |out - exact| and |exact|, added to the sums
static double run(Random & r, const Case & c) {
    Store k(r, c.type_k, c.size, c.kv_heads, c.cells, c.streams), v(r, c.type_v, c.size_v, c.kv_heads, c.cells, c.streams);
    Store q(r, GGML_TYPE_F32, c.size, c.heads, c.tokens, c.streams), sinks(r, GGML_TYPE_F32, c.heads, 1, 1, 1);
    const int mask_heads = c.per_head ? c.heads : 1;
    const size_t n_mask  = (size_t) c.cells * c.tokens * mask_heads * c.streams;
    std::unique_ptr<uint16_t[]> mask_data(new uint16_t[n_mask]);
    for (size_t i = 0; i < n_mask; i++) {
        const bool hole = (float) pick(r, 0, 999) < c.holes * 1000;
        mask_data[i] = hole ? 0xFC00 : c.max_bias > 0 ? (uint16_t) (random_half(r, 17) | 0x8000) : 0;
    }
    ggml_tensor mask = {};
    mask.type = GGML_TYPE_F16;
    mask.data = mask_data.get();
    const int64_t mask_ne[4] = { c.cells, c.tokens, mask_heads, c.streams };
    mask.nb[0] = 2;
    for (int i = 0; i < 4; i++) {
        mask.ne[i] = mask_ne[i];
        mask.nb[i] = i ? mask.nb[i - 1] * mask_ne[i - 1] : 2;
    }

    const int64_t n_out = (int64_t) c.size_v * c.heads * c.tokens * c.streams;
    std::unique_ptr<float[]> out(new float[n_out]);
    ggml_tensor dst = {};
    dst.type = GGML_TYPE_F32;
    dst.data = out.get();
    const int64_t ne[4] = { c.size_v, c.heads, c.tokens, c.streams };
    for (int i = 0; i < 4; i++) {
        dst.ne[i] = ne[i];
        dst.nb[i] = i ? dst.nb[i - 1] * ne[i - 1] : 4;
    }
    const float scale = 1.0f / std::sqrt((float) c.size);
    const float numbers[3] = { scale, c.max_bias, c.softcap };
    memcpy(dst.op_params, numbers, sizeof(numbers));
    dst.src[0] = &q.tensor;
    dst.src[1] = &k.tensor;
    dst.src[2] = &v.tensor;
    dst.src[3] = c.masked ? &mask : nullptr;
    dst.src[4] = c.sinks ? &sinks.tensor : nullptr;

    ggml_threadpool pool;
    pool.n = c.threads;
    const size_t work = hg_attention_work_size(&dst, c.threads);
    std::unique_ptr<char[]> scratch(new char[work]);
    std::atomic<int> done{0};
    std::vector<std::thread> threads;
    for (int t = 0; t < c.threads; t++) {
        threads.emplace_back([&, t] {
            ggml_compute_params params = { t, c.threads, work, scratch.get(), &pool, false };
            done += hg_attention_compute(&params, &dst);
        });
    }
    for (auto & t : threads) {
        t.join();
    }
    if (done != c.threads) {
        std::printf("a case was refused: size %d/%d\n", c.size, c.size_v);
        std::exit(1);
    }

    double wrong = 0, whole = 0;
    std::vector<double> p(c.cells), exact(c.size_v);
    for (int s = 0; s < c.streams; s++) {
        for (int t = 0; t < c.tokens; t++) {
            for (int h = 0; h < c.heads; h++) {
                const double * x = &q.values[(((int64_t) s * c.tokens + t) * c.heads + h) * c.size];
                double top = c.sinks ? sinks.values[h] : -INFINITY, sum = 0;
                for (int j = 0; j < c.cells; j++) {
                    const double * y = &k.values[(((int64_t) s * c.cells + j) * c.kv_heads + h / (c.heads / c.kv_heads)) * c.size];
                    p[j] = 0;
                    for (int d = 0; d < c.size; d++) {
                        p[j] += x[d] * y[d];
                    }
                    p[j] *= scale;
                    if (c.softcap > 0) {
                        p[j] = c.softcap * std::tanh(p[j] / c.softcap);
                    }
                    if (c.masked) {
                        const size_t at = (((size_t) s * mask_heads + h % mask_heads) * c.tokens + t) * c.cells + j;
                        p[j] = mask_data[at] == 0xFC00 ? -INFINITY : p[j] + slope(c, h) * half_to_float(mask_data[at]);
                    }
                    top = std::max(top, p[j]);
                }
                std::fill(exact.begin(), exact.end(), 0.0);
                for (int j = 0; j < c.cells && top > -INFINITY; j++) {
                    const double w = std::exp(p[j] - top);
                    sum += w;
                    const double * y = &v.values[(((int64_t) s * c.cells + j) * c.kv_heads + h / (c.heads / c.kv_heads)) * c.size_v];
                    for (int d = 0; d < c.size_v; d++) {
                        exact[d] += w * y[d];
                    }
                }
                if (c.sinks && top > -INFINITY) {
                    sum += std::exp(sinks.values[h] - top);
                }
                const float * o = out.get() + (((int64_t) s * c.tokens + t) * c.heads + h) * c.size_v;
                for (int d = 0; d < c.size_v; d++) {
                    const double e = sum > 0 ? exact[d] / sum : 0;
                    wrong += (o[d] - e) * (o[d] - e);
                    whole += e * e;
                }
            }
        }
    }
    return std::sqrt(wrong) / (whole > 0 ? std::sqrt(whole) : 1.0);
}

// Integer products, which go with quantized keys, round queries and weights to 16 bits. Scales here differ by a factor of 2^8
// between cells; stock has 5e-3.
static double limit(const Case & c) {
    const bool integers = block_size(c.type_k) > 1 && c.tokens <= 8 && std::strcmp(hg_attention_isa(), "avx512-vnni") == 0;
    return integers ? 4e-4 : 3e-6;
}

int main(int argc, char ** argv) {
    for (int h = 0; h < 1 << 16; h++) {
        ggml_table_f32_f16[h] = half_to_float((uint16_t) h);
    }
    const uint64_t seed  = argc > 1 ? std::strtoull(argv[1], nullptr, 10) : std::random_device()();
    const int      cases = argc > 2 ? std::atoi(argv[2]) : 200;
    double worst = 0;
    for (int i = 0; i < cases; i++) {
        Random r(seed + (uint64_t) i);
        const Case c = random_case(r);
        const double error = run(r, c);
        if (!(error <= limit(c))) {
            std::printf("seed %llu: error %g: types %d/%d size %d/%d heads %d/%d cells %d tokens %d streams %d threads %d mask %d/%d "
                        "holes %g sinks %d softcap %g bias %g\n",
                        (unsigned long long) (seed + (uint64_t) i), error, c.type_k, c.type_v, c.size, c.size_v, c.heads, c.kv_heads,
                        c.cells, c.tokens, c.streams, c.threads, c.masked, c.per_head, c.holes, c.sinks, c.softcap, c.max_bias);
            return 1;
        }
        worst = std::max(worst, error);
    }
    std::printf("%s: %d cases from seed %llu, largest error %.2e\n", hg_attention_isa(), cases, (unsigned long long) seed, worst);
    return 0;
}
