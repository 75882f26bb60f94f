// Attention of a few queries over keys and values that are read where they lie in the cache, a block at a time: what
// comes out is, to the bit, what products with panels give (see attention.cpp).
#pragma once

#include <algorithm>
#include <type_traits>

#include "format.h"
#include "places.h"

// Whether keys and values can be read where they lie: not where the processor multiplies pairs of bfloat16.
template <class Format>
constexpr bool READS_IN_PLACE = Format::GROUP == 1 || std::is_same_v<typename Format::Input, WideBf16>;

// The first vector at p of an array that ends `count` elements on. Whole ones are read without a look at the count.
template <bool WHOLE, class T>
inline F32 load_at(const T* p, int64_t count) {
    if constexpr (WHOLE) return load(p);
    return load_first(p, std::clamp<int64_t>(count, 0, LANES));
}

// The scores of COUNT queries, rows of `stride` elements, with the keys of a block: scores [COUNT][64]. Those of keys
// that no query sees mean nothing. WHOLE: n is a multiple of LANES. `soon` is what will be read after these.
template <int COUNT, bool WHOLE, class Input, class T>
void score_in_place(const Input* queries, int64_t stride, const T* cache, const Places& places, const Places& soon,
                    int64_t n, float* scores) {
    for (int64_t column = places.first / LANES * LANES; column < places.last; column += LANES) {
        const T* keys[LANES];
        for (int i = 0; i < LANES; i++) {
            keys[i] = cache + places.somewhere(column + i);
            soon.prefetch(cache, n, column + i);
        }
        F32 sums[COUNT] = {};
        for (int64_t d = 0; d < n; d += LANES) {
            F32 square[LANES];
            UNROLLED for (int i = 0; i < LANES; i++) square[i] = load_at<WHOLE>(keys[i] + d, n - d);
            transpose(square);
            UNROLLED for (int i = 0; i < LANES; i++)
                UNROLLED for (int query = 0; query < COUNT; query++)
                    sums[query] = square[i] * to_float(queries[query * stride + d + i]) + sums[query];
        }
        for (int query = 0; query < COUNT; query++) store(scores + query * BLOCK + column, sums[query]);
    }
}

// Adds to values [COUNT][width] those of a block, weighed by weights [COUNT][64]. WHOLE: n is a multiple of 2 * LANES.
template <int COUNT, bool WHOLE, class Input, class T>
void weigh_in_place(const Input* weights, const T* cache, const Places& places, const Places& soon, int64_t n,
                    float* values, int64_t width) {
    constexpr int WIDE = 2;  // vectors at a time
    for (int64_t d = 0; d < n; d += WIDE * LANES) {
        F32 sums[COUNT][WIDE] = {};
        for (int64_t key = places.first; key < places.last; key++) {
            const T* from = cache + places.offset[key] + d;
            if (d == 0) soon.prefetch(cache, n, key);
            F32 value[WIDE];
            UNROLLED for (int i = 0; i < WIDE; i++) value[i] = load_at<WHOLE>(from + i * LANES, n - d - i * LANES);
            UNROLLED for (int query = 0; query < COUNT; query++)
                UNROLLED for (int i = 0; i < WIDE; i++)
                    sums[query][i] = value[i] * to_float(weights[query * BLOCK + key]) + sums[query][i];
        }
        for (int query = 0; query < COUNT; query++)
            for (int64_t i = 0; i < WIDE && d + i * LANES < width; i++) {
                float* out = values + query * width + d + i * LANES;
                store(out, load(out) + sums[query][i]);
            }
    }
}

// Calls run(count, whole, first) for `rows` queries in groups whose size, like `whole`, the compiler knows.
template <class Run>
void in_groups(bool whole, int64_t rows, Run run) {
    auto call = [&](auto count, int64_t row) {
        whole ? run(count, std::true_type{}, row) : run(count, std::false_type{}, row);
    };
    int64_t row = 0;
    for (; rows - row >= 4; row += 4) call(std::integral_constant<int, 4>{}, row);
    switch (rows - row) {
        case 3: return call(std::integral_constant<int, 3>{}, row);
        case 2: return call(std::integral_constant<int, 2>{}, row);
        case 1: return call(std::integral_constant<int, 1>{}, row);
    }
}
