// Softmax of scores as tiles give them: a span of keys by 16 queries.
//
// A query's weights and sums have the same bits by columns, where lanes are queries, and by rows, where lanes are keys.
#pragma once

#include "format.h"
#include "paged_block.h"

#if defined(__AVX512BF16__)

namespace tile_softmax {

constexpr int64_t STEP = 32;     // keys of one tile of weights
constexpr float NONE = -1e30f;   // the score of a key that is not seen; finite, so that differences are numbers
constexpr float LOG2_E = 1.44269504f;

// Sums over keys of 16 queries: values weighed by exp(score - most), the weights, and the largest score.
struct Sums {
    float* values;   // [width][16], or [queries][width] of few queries
    float* weights;  // [16]
    float* most;     // [16]

    static constexpr int64_t size(int64_t width) { return PANEL * (width + 2); }

    static Sums at(float* memory, int64_t width) {
        return {memory, memory + PANEL * width, memory + PANEL * (width + 1)};
    }

    void clear(int64_t width) const {
        std::fill(values, values + PANEL * width, 0.0f);
        store(weights, F32{});
        store(most, broadcast(NONE));
    }
};

// 2 to the x, to 3 millionths: a weight is rounded to 8 bits. x = n + f, and 2^f is a polynomial, 1 at 0.
inline F32 exp2(F32 x) {
    const F32 magic = broadcast(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
    asm("" : "+v"(x));                         // else x - n becomes a fused multiply-add, of an x that is not rounded
    F32 n = x + magic - magic, f = x - n;
    F32 p = f * 0.009582853085f + 0.05590642461f;
    p = p * f + 0.2402409861f;
    p = p * f + 0.6931241934f;
    p = p * f + 1.0f;
    return (F32)_mm512_maskz_scalef_ps(__mmask16(-1), (__m512)p, (__m512)n);  // GCC 12 warns where there is no mask
}

// e to the difference of two largest scores.
inline F32 rescaling(F32 most, F32 larger) { return exp2((most - larger) * LOG2_E); }

// Scores of keys in the order of positions, which queries at `position` see: those before it, as far as the window.
struct Mask {
    float softcap;  // 0: none
    I32 first, last;
    bool hides;

    F32 operator()(F32 score, I32 key) const {
        if (softcap != 0) score = tanh(score / softcap) * softcap;
        return hides ? (key >= first) & (key <= last) ? score : broadcast(NONE) : score;
    }

    bool changes() const { return hides || softcap != 0; }
};

// The exponent's base: less than any score would give a query that sees no key the weight 1.
inline F32 base_of(F32 most) { return max(most, broadcast(NONE / 2)) * LOG2_E; }

// A weight as products take it: to nearest.
inline U32 rounded(F32 weight) { return bit_cast<U32>(weight) + 0x8000u; }

// Turns scores of keys [from, to) of a span, [key][16], into weights as a panel, [key / 2][16][2].
// mask(key) is that of 16 keys from `key` on.
template <class GetMask>
void weigh_columns(float* scores, int64_t from, int64_t to, const GetMask& mask, const Sums& sums, char* weights) {
    F32 most[4];
    UNROLLED for (F32& part : most) part = broadcast(NONE);
    for (int64_t key = from; key < to; key += PANEL) {
        float* rows = scores + key * PANEL;
        Mask hidden = mask(key);
        for (int row = 0; hidden.changes() && row < PANEL; row++)
            store(rows + row * PANEL, hidden(load(rows + row * PANEL), I32{} + int32_t(key + row)));
        UNROLLED for (int row = 0; row < PANEL; row++) most[row % 4] = max(load(rows + row * PANEL), most[row % 4]);
    }
    F32 largest = max(max(most[0], most[1]), max(most[2], most[3])), base = base_of(largest), totals[PANEL] = {};
    for (int64_t key = from; key < to; key += PANEL)
        UNROLLED for (int row = 0; row < PANEL; row += 2) {
            const float* score = scores + (key + row) * PANEL;
            F32 even = exp2(load(score) * LOG2_E - base), odd = exp2(load(score + PANEL) * LOG2_E - base);
            totals[row] = totals[row] + even;
            totals[row + 1] = totals[row + 1] + odd;
            U32 pairs = rounded(even) >> 16 | (rounded(odd) & 0xFFFF0000u);
            std::memcpy(weights + (key + row) / 2 * ROW_BYTES, &pairs, sizeof pairs);
        }
    for (int half = PANEL / 2; half > 0; half /= 2)
        for (int row = 0; row < half; row++) totals[row] = totals[row] + totals[row + half];
    store(sums.weights, totals[0]);
    store(sums.most, largest);
}

// The same of one query, whose scores are side by side: into weights as floats, [key].
template <class GetMask>
void weigh_row(float* scores, int64_t from, int64_t to, const GetMask& mask, const Sums& sums, int64_t query) {
    F32 most = broadcast(NONE), total = {};
    for (int64_t key = from; key < to; key += PANEL) {
        F32 x = mask(key)(load(scores + key), lanes() + int32_t(key));
        store(scores + key, x);
        most = max(x, most);
    }
    float largest = max(most);
    F32 base = base_of(broadcast(largest));
    for (int64_t key = from; key < to; key += PANEL) {
        F32 weight = exp2(load(scores + key) * LOG2_E - base);
        total = total + weight;
        store(scores + key, bit_cast<F32>(rounded(weight) & 0xFFFF0000u));
    }
    sums.weights[query] = sum(total);
    sums.most[query] = largest;
}

inline F32 scaled_sum(F32 before, F32 factor, F32 now, F32 other) {
    return (F32)_mm512_fmadd_ps((__m512)before, (__m512)factor, _mm512_mul_ps((__m512)now, (__m512)other));
}

// Adds weights and largest scores of `part`, of later keys, to `total`; returns the factors of both ones' values.
struct Factors {
    F32 before, now;

    static Factors merge(const Sums& total, const Sums& part) {
        F32 before = load(total.most), now = load(part.most), most = max(before, now);
        Factors factors = {rescaling(before, most), rescaling(now, most)};
        store(total.weights, scaled_sum(load(total.weights), factors.before, load(part.weights), factors.now));
        store(total.most, most);
        return factors;
    }
};

// Adds the values of 16 queries by columns.
inline void merge_columns(const Sums& total, const Sums& part, int64_t width) {
    Factors factors = Factors::merge(total, part);
    for (int64_t i = 0; i < width * PANEL; i += LANES)
        store(total.values + i,
              scaled_sum(load(total.values + i), factors.before, load(part.values + i), factors.now));
}

// The same of a few queries by rows.
inline void merge_rows(const Sums& total, const Sums& part, int64_t queries, int64_t width) {
    Factors factors = Factors::merge(total, part);
    for (int64_t query = 0; query < queries; query++) {
        F32 before = broadcast(factors.before[query]), now = broadcast(factors.now[query]);
        float *sum = total.values + query * width, *more = part.values + query * width;
        for (int64_t d = 0; d < width; d += LANES)
            store(sum + d, scaled_sum(load(sum + d), before, load(more + d), now));
    }
}

}  // namespace tile_softmax

#endif
