// The C interface of this library, mirrored in native/abi.py. Pointers are to contiguous memory unless a stride is
// given; the Python side has checked shapes and dtypes. Functions that can fail return a `Status` (see guard.h).
#include "causal_conv.h"
#include "cpu.h"
#include "decoder.h"
#include "format.h"
#include "guard.h"
#include "logits.h"
#include "shm_collectives.h"
#include "pack.h"
#include "pool.h"
#include "recurrent.h"
#include "rows.h"
#include "sampling.h"

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace {

// Runs body(T) with a T of a dtype.
template <class Body>
void with_type(int64_t dtype, const Body& body) {
    dtype == FLOAT32 ? body(float()) : body(Bf16());
}

// Runs body(row, T) over rows of n elements of a dtype.
template <class Body>
void for_rows(int64_t rows, int64_t n, int64_t dtype, const Body& body) {
    pool::for_rows(rows, n, [&](int64_t row) { with_type(dtype, [&](auto t) { body(row, t); }); });
}

template <class T>
T* at(void* memory, int64_t index) {
    return static_cast<T*>(memory) + index;
}

template <class T>
const T* at(const void* memory, int64_t index) {
    return static_cast<const T*>(memory) + index;
}

}  // namespace

// Sum of the struct sizes, to detect an abi.py of another version.
EXPORT int64_t tercet_struct_bytes() noexcept {
    return int64_t(sizeof(Model) + sizeof(Layer) + sizeof(Step) + sizeof(Rows) + sizeof(Scoring) + sizeof(Filter) +
                   sizeof(Packing) + sizeof(BlockSource) + sizeof(ShmCollectives) + sizeof(Mixture) + sizeof(Adapters) + sizeof(AdapterRows) +
                   sizeof(Recurrence) + sizeof(Segment) + sizeof(DeltaRows) + sizeof(Convolution));
}

EXPORT int64_t tercet_levels() noexcept { return levels(); }
EXPORT int64_t tercet_threads() noexcept { return pool::threads(); }

// Message of this thread's last failed call.
EXPORT const char* tercet_message() noexcept { return message(); }

EXPORT int64_t tercet_set_threads(int64_t threads) {
    return guarded([&] { pool::set_threads(int(threads)); });
}

// out [rows, n] = rmsnorm(x + residual); with a residual, total [rows, n] = x + residual.
EXPORT int64_t tercet_rmsnorm(const void* x, const void* residual, const void* weight, void* out, void* total,
                              int64_t rows, int64_t n, float eps, int64_t dtype, int64_t weight_dtype) {
    return guarded([&] {
        for_rows(rows, n, dtype, [&](int64_t row, auto t) {
            using T = decltype(t);
            const T* from = at<T>(x, row * n);
            if (residual) {
                const T* more = at<T>(residual, row * n);
                T* into = at<T>(total, row * n);
                over(n, [&](int64_t i, auto get, auto put) { put(into + i, get(from + i) + get(more + i)); });
                from = into;
            }
            with_type(weight_dtype, [&](auto w) {
                rmsnorm_row(from, at<decltype(w)>(weight, 0), n, eps, at<T>(out, row * n));
            });
        });
    });
}

// out [tokens, heads, n] from x and the gates of tokens, which are gate_stride elements apart.
EXPORT int64_t tercet_gated_rmsnorm(const float* x, const void* weight, const void* gate, int64_t gate_stride,
                                    void* out, int64_t tokens, int64_t heads, int64_t n, float eps, int64_t sigmoid,
                                    int64_t dtype, int64_t weight_dtype) {
    return guarded([&] {
        for_rows(tokens * heads, n, dtype, [&](int64_t row, auto t) {
            using T = decltype(t);
            const T* by = at<T>(gate, row / heads * gate_stride + row % heads * n);
            with_type(weight_dtype, [&](auto w) {
                gated_rmsnorm_row(x + row * n, at<decltype(w)>(weight, 0), by, n, eps, sigmoid, at<T>(out, row * n));
            });
        });
    });
}

// out [rows, n] from x [rows, 2 * n].
EXPORT int64_t tercet_silu_and_mul(const void* x, void* out, int64_t rows, int64_t n, int64_t dtype) {
    return guarded([&] {
        for_rows(rows, n, dtype, [&](int64_t row, auto t) {
            using T = decltype(t);
            silu_and_mul_row(at<T>(x, 2 * row * n), n, at<T>(out, row * n));
        });
    });
}

// x [tokens][heads][head_dim], tokens x_stride elements apart, rotated into out [tokens, heads, head_dim].
EXPORT int64_t tercet_rope(const void* x, int64_t x_stride, void* out, const int64_t* positions, const float* table,
                           int64_t rotary_dim, int64_t tokens, int64_t heads, int64_t head_dim, int64_t dtype) {
    return guarded([&] {
        for_rows(tokens, heads * head_dim, dtype, [&](int64_t token, auto t) {
            using T = decltype(t);
            const float* angles = table + positions[token] * rotary_dim;
            for (int64_t head = 0; head < heads; head++)
                rotate_head(at<T>(x, token * x_stride + head * head_dim), angles, rotary_dim / 2, head_dim,
                            at<T>(out, (token * heads + head) * head_dim));
        });
    });
}

EXPORT int64_t tercet_attend(const float* q, const Cache* cache, const Rows* rows, const Scoring* scoring,
                             int64_t heads, float* out) {
    return guarded([&] {
        refuse(find_fault(*rows, *cache));
        attend({q, heads * cache->head_dim, *cache, *rows, *scoring, heads, out, heads * cache->value_dim});
    });
}

EXPORT int64_t tercet_packed_bytes(int64_t n, int64_t k, int64_t format) noexcept { return packed_bytes(n, k, format); }

EXPORT int64_t tercet_pack(const void* weight, int64_t source, int64_t n, int64_t k, const Packing* packing) {
    return guarded([&] { pack(weight, source, n, k, *packing); });
}

// Fills in scale type and zero of the source's coding.
EXPORT int64_t tercet_choose_coding(BlockSource* source) {
    return guarded([&] { choose_coding(*source); });
}

EXPORT int64_t tercet_packed_block_bytes(int64_t n, int64_t k, const Coding* coding) noexcept {
    return packed_block_bytes(n, k, *coding);
}

EXPORT int64_t tercet_pack_blocks(const BlockSource* source, const Coding* coding, const Packing* packing) {
    return guarded([&] { pack_blocks(*source, *coding, *packing); });
}

EXPORT int64_t tercet_linear(const Linear* weights, const float* x, int64_t m, float* out) {
    return guarded([&] { linear(*weights, x, m, out); });
}

// out [tokens, hidden] from x [tokens, hidden].
EXPORT int64_t tercet_mixture(const Mixture* mixture, const float* x, int64_t tokens, float* out) {
    return guarded([&] {
        std::memset(out, 0, size_t(tokens * mixture->router.k) * sizeof *out);
        add_mixture(*mixture, x, tokens, out);
    });
}

EXPORT int64_t tercet_unpack_rows(const Linear* weights, const int64_t* index, int64_t rows, float* out) {
    return guarded([&] {
        for_rows(rows, weights->k, FLOAT32,
                 [&](int64_t i, auto) { unpack_row(*weights, index[i], out + i * weights->k); });
    });
}

EXPORT int64_t tercet_forward(const Model* model, const Step* step, float* hidden) {
    return guarded([&] {
        refuse(find_fault(*model, *step));
        forward(*model, *step, hidden);
    });
}

EXPORT int64_t tercet_causal_conv(const Convolution* conv, const Segment* segments, int64_t count) {
    return guarded([&] { causal_conv(*conv, segments, count); });
}

EXPORT int64_t tercet_delta_rule(const Recurrence* recurrence, const DeltaRows* tokens, const Segment* segments,
                                 int64_t count) {
    return guarded([&] { delta_rule(*recurrence, *tokens, segments, count); });
}

EXPORT int64_t tercet_state_space_scan(const Recurrence* recurrence, const Segment* segments, int64_t count,
                                       const float* c, const float* b, const float* x) {
    return guarded([&] { state_space_scan(*recurrence, segments, count, c, b, x); });
}

EXPORT int64_t tercet_selective_scan(const Recurrence* recurrence, const Segment* segments, int64_t count,
                                     const float* c, const float* b, const float* x, const float* step) {
    return guarded([&] { selective_scan(*recurrence, segments, count, c, b, x, step); });
}

EXPORT int64_t tercet_argmax(const float* logits, int64_t rows, int64_t vocab, float* most, int64_t* index) {
    return guarded([&] { argmax(logits, rows, vocab, most, index); });
}

EXPORT int64_t tercet_apply_bitmask(float* logits, int64_t rows, int64_t vocab, const int32_t* mask,
                                    int64_t mask_stride) {
    return guarded([&] { apply_bitmask(logits, rows, vocab, mask, mask_stride); });
}

EXPORT int64_t tercet_penalize(float* logits, int64_t vocab, const int64_t* rows, const int64_t* sequences,
                               int64_t count, const int32_t* output, const uint8_t* prompt, const float* repetition,
                               const float* frequency, const float* presence) {
    return guarded([&] {
        penalize(logits, vocab, rows, sequences, count, {output, prompt}, {repetition, frequency, presence});
    });
}

EXPORT int64_t tercet_token_logprobs(const float* logits, int64_t vocab, const int64_t* rows, const int64_t* tokens,
                                     int64_t count, int64_t top, float* chosen, int64_t* top_ids,
                                     float* top_logprobs) {
    return guarded([&] { token_logprobs(logits, vocab, rows, tokens, count, top, chosen, top_ids, top_logprobs); });
}

EXPORT int64_t tercet_gumbel(const NoiseKey* keys, const int64_t* rows, const int64_t* tokens, int64_t count,
                             float* out) {
    return guarded([&] {
        pool::run_pieces(count, 512, [&](int64_t from, int64_t to) {
            for (int64_t i = from; i < to; i++) out[i] = noise::gumbel(keys[rows[i]], uint32_t(tokens[i]));
        });
    });
}

EXPORT int64_t tercet_sample(const float* logits, int64_t rows, int64_t vocab, const float* temperature,
                             const Filter* filters, const NoiseKey* keys, int64_t* tokens) {
    return guarded([&] { sample(logits, rows, vocab, temperature, filters, keys, tokens); });
}

EXPORT int64_t tercet_shm_bytes(int64_t size, int64_t room) noexcept { return shm_bytes(size, room); }

EXPORT int64_t tercet_sum_over_ranks(ShmCollectives* group, void* x, int64_t n, int64_t dtype) {
    return guarded([&] { sum_over_ranks(*group, x, n, dtype); });
}

EXPORT int64_t tercet_gather_from_ranks(ShmCollectives* group, const char* x, int64_t bytes, char* out) {
    return guarded([&] { gather_from_ranks(*group, x, bytes, out); });
}
