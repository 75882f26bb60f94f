// Sums of a few values of a block that are read where they lie in the cache: what comes out is, to the bit, what products
// with panels give (see attention.cpp).
#pragma once

#include <type_traits>

#include "lay_out.h"
#include "places.h"
#include "product.h"

// Whether values can be read where they lie: not where the processor multiplies pairs of bfloat16.
template <class Format>
constexpr bool READS_IN_PLACE = Format::GROUP == 1 || std::is_same_v<typename Format::Input, WideBf16>;

// Elements of a value that are summed up at once for so many queries: 6 to 8 vectors of sums, and what they are made of,
// fill the registers.
constexpr int64_t elements_at_once(int queries) { return (queries > 2 ? 2 : 4) * LANES; }

// The sums of the halves of words, side by side again as the halves are.
template <int STEPS>
inline void rejoin(F32 (&halves)[STEPS]) {
    if constexpr (STEPS == 2) {
        F32 lower = interleave_lower(halves[0], halves[1]);
        halves[1] = interleave_upper(halves[0], halves[1]);
        halves[0] = lower;
    }
}

// Adds to sums [COUNT][width] the values of a block, weighed by weights [COUNT][64]. WHOLE: n is a multiple of
// `elements_at_once`. Meanwhile keys and values of `soon`, the block that will be read next, are called for, a part in
// every pass: all at once they would wait for one another.
template <class Format, int COUNT, bool WHOLE, class Input, class T>
void weigh_in_place(const Input* weights, const T* k, const T* v, const Places& places, const Places& soon, int64_t n,
                    float* sums, int64_t width) {
    constexpr int STEPS = Format::STEPS;
    constexpr int64_t ELEMENTS = elements_at_once(COUNT), WORDS = ELEMENTS / (STEPS * LANES);
    for (int64_t d = 0; d < n; d += ELEMENTS) {
        F32 more[COUNT][WORDS][STEPS] = {};
        for (int64_t key = places.first; key < places.last; key++) {
            soon.prefetch(k, key, d, d + ELEMENTS);
            soon.prefetch(v, key, d, d + ELEMENTS);
            UNROLLED for (int i = 0; i < WORDS; i++) {
                F32 words = load_words<WHOLE>(v + places.offset[key], d + i * STEPS * LANES, n);
                UNROLLED for (int step = 0; step < STEPS; step++) {
                    F32 value = Format::read(reinterpret_cast<const char*>(&words), step);
                    UNROLLED for (int query = 0; query < COUNT; query++) {
                        F32& sum = more[query][i][step];
                        sum = product::settled(value * to_float(weights[query * BLOCK + key]) + sum);
                    }
                }
            }
        }
        for (int query = 0; query < COUNT; query++)
            for (int i = 0; i < WORDS; i++) {
                rejoin(more[query][i]);
                for (int64_t step = 0; step < STEPS; step++)
                    if (int64_t at = d + (i * STEPS + step) * LANES; at < width) {
                        float* out = sums + query * width + at;
                        store(out, load(out) + more[query][i][step]);
                    }
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
