// Weighted sums of the values of a block, read in place from the cache. The results are bitwise equal to those of
// products with panels (see attention.cpp).
#pragma once

#include <type_traits>

#include "repack.h"
#include "paged_block.h"
#include "product.h"

// Whether values can be read where they lie: not where tiles add up pairs of bfloat16, in an order of their own.
template <class Format>
constexpr bool READS_IN_PLACE = Format::GROUP == 1 || !amx::HERE;

// How values of KEYS keys are weighed, which are read as words of 4 bytes: those elements of the words at once that are
// the same half of each.
template <class Format>
struct Weighed {
    using Values = F32;
    static constexpr int KEYS = 1, HALVES = Format::STEPS;
    static inline F32 half(const F32* words, int half) { return Format::read(reinterpret_cast<const char*>(words), half); }
    static inline F32 add(F32 sums, const typename Format::Input* weight, F32 values) {
        return values * to_float(*weight) + sums;
    }
};

#if defined(__AVX512BF16__)
// Pairs of keys side by side, as a panel has them.
template <>
struct Weighed<Bfloats> {
    using Values = __m512i;
    static constexpr int KEYS = 2, HALVES = 2;
    static inline __m512i half(const F32* words, int half) {
        U32 first = bit_cast<U32>(words[0]), second = bit_cast<U32>(words[1]);
        return (__m512i)(half ? first >> 16 | (second & 0xFFFF0000u) : (first & 0xFFFFu) | second << 16);
    }
    static inline F32 add(F32 sums, const Bf16* weights, __m512i values) { return Bfloats::dot(sums, weights, values, 0); }
};
#endif

constexpr int MOST_AT_ONCE = LANES == 16 ? 8 : 4;  // queries

// Elements of a value that are summed up at once for so many queries: 6 to 8 vectors of sums, of 32 registers 16, and
// what they are made of fill the registers.
constexpr int64_t elements_at_once(int queries) { return (queries > MOST_AT_ONCE / 2 ? 2 : 4) * LANES; }

// The sums of the halves of words, side by side again as the halves are.
template <int HALVES>
inline void rejoin(F32 (&halves)[HALVES]) {
    if constexpr (HALVES == 2) {
        F32 lower = interleave_lower(halves[0], halves[1]);
        halves[1] = interleave_upper(halves[0], halves[1]);
        halves[0] = lower;
    }
}

// Undoes `rejoin`.
inline void separate(F32 (&halves)[2]) {
    F32 even, odd;
    for (int i = 0; i < LANES; i++) {
        even[i] = halves[2 * i / LANES][2 * i % LANES];
        odd[i] = halves[2 * i / LANES][2 * i % LANES + 1];
    }
    halves[0] = even, halves[1] = odd;
}

// Adds to sums [COUNT][width] the values of a block, weighed by weights [COUNT][64]. WHOLE: n is a multiple of
// `elements_at_once`. Meanwhile keys and values of `soon`, the block that will be read next, are called for, a part in
// every pass: all at once they would wait for one another.
template <class Format, int COUNT, bool WHOLE, class Input, class T>
void weigh_in_place(const Input* weights, const T* k, const T* v, const BlockOffsets& offsets, const BlockOffsets& soon, int64_t n,
                    float* sums, int64_t width) {
    using Way = Weighed<Format>;
    constexpr int HALVES = Way::HALVES, KEYS = Way::KEYS;
    constexpr int64_t ELEMENTS = elements_at_once(COUNT), WORDS = ELEMENTS / (HALVES * LANES);
    for (int64_t d = 0; d < n; d += ELEMENTS) {
        F32 more[COUNT][WORDS][HALVES] = {};
        for (int64_t key = offsets.first / KEYS * KEYS; key < offsets.last; key += KEYS) {
            UNROLLED for (int i = 0; i < KEYS; i++) {
                soon.prefetch(k, key + i, d, d + ELEMENTS);
                soon.prefetch(v, key + i, d, d + ELEMENTS);
            }
            UNROLLED for (int i = 0; i < WORDS; i++) {
                F32 words[KEYS];
                UNROLLED for (int j = 0; j < KEYS; j++)
                    words[j] = KEYS == 1 || offsets.offset[key + j] != HIDDEN
                                   ? load_words<WHOLE>(v + offsets.offset[key + j], d + i * HALVES * LANES, n)
                                   : F32{};
                UNROLLED for (int half = 0; half < HALVES; half++) {
                    typename Way::Values values = Way::half(words, half);
                    UNROLLED for (int query = 0; query < COUNT; query++) {
                        F32& sum = more[query][i][half];
                        sum = settled(Way::add(sum, weights + query * BLOCK + key, values));
                    }
                }
            }
        }
        for (int query = 0; query < COUNT; query++)
            for (int i = 0; i < WORDS; i++) {
                rejoin(more[query][i]);
                for (int64_t half = 0; half < HALVES; half++)
                    if (int64_t at = d + (i * HALVES + half) * LANES; at < width) {
                        float* out = sums + query * width + at;
                        store(out, load(out) + more[query][i][half]);
                    }
            }
    }
}

// Calls run(count, whole, first) for `rows` queries in groups whose size, like `whole`, the compiler knows: of SIZE at
// the most.
template <int SIZE = MOST_AT_ONCE, class Run>
void in_groups(bool whole, int64_t rows, Run run, int64_t first = 0) {
    if constexpr (SIZE > 0) {
        for (; rows - first >= SIZE; first += SIZE) {
            std::integral_constant<int, SIZE> count;
            whole ? run(count, std::true_type{}, first) : run(count, std::false_type{}, first);
        }
        in_groups<SIZE - 1>(whole, rows, run, first);
    }
}
