// The three number formats of weights, and the one layout they share.
//
// A weight matrix [n, k] is cut into panels of 16 outputs. A panel is k / GROUP rows of 64 bytes: row g holds, for each
// of the 16 outputs, the GROUP inputs g * GROUP ... that make up 4 bytes: 1 float32, 2 bfloat16 or 4 int8. So one
// kernel serves all three: broadcast 4 bytes of an input row, multiply by a 64-byte row of weights, add to 16 sums. 16
// rows are one AMX tile. What a panel has beyond n outputs and k inputs is zero.
#pragma once

#include "vec.h"

constexpr int PANEL = 16;             // outputs
constexpr int ROW_BYTES = 64;         // of one row of a panel
constexpr int TILE_ROWS = 16;         // rows are padded to a multiple of this
constexpr int PARTS = PANEL / LANES;  // vectors that hold 16 sums

inline int64_t round_up(int64_t x, int64_t to) { return (x + to - 1) / to * to; }

struct Floats {
    using Element = float;
    using Sums = F32;
    static constexpr int GROUP = 1;
    static inline F32 dot(F32 sums, uint32_t x, const char* weights) {
        return load(reinterpret_cast<const float*>(weights)) * bit_cast<float>(x) + sums;
    }
};

struct Bfloats {
    using Element = Bf16;
    using Sums = F32;
    static constexpr int GROUP = 2;
    static inline F32 dot(F32 sums, uint32_t x, const char* weights) {
#if defined(__AVX512BF16__)
        __m512i pairs = _mm512_loadu_si512(weights);
        return (F32)_mm512_dpbf16_ps((__m512)sums, (__m512bh)_mm512_set1_epi32(int(x)), (__m512bh)pairs);
#else
        U32 pairs;
        std::memcpy(&pairs, weights, sizeof pairs);
        F32 even = bit_cast<F32>(pairs << 16), odd = bit_cast<F32>(pairs & 0xFFFF0000u);
        return odd * bit_cast<float>(x & 0xFFFF0000u) + (even * bit_cast<float>(x << 16) + sums);
#endif
    }
};

// Inputs are kept as unsigned bytes, 128 more than their value, because that is what VNNI multiplies by signed weights;
// the excess is taken off in the end (see `Linear::scales`).
struct Bytes {
    using Element = int8_t;
    using Sums = I32;
    static constexpr int GROUP = 4;
    static inline I32 dot(I32 sums, uint32_t x, const char* weights) {
#if defined(__AVX512VNNI__)
        return (I32)_mm512_dpbusd_epi32((__m512i)sums, _mm512_set1_epi32(int(x)), _mm512_loadu_si512(weights));
#else
        I32 quads;
        std::memcpy(&quads, weights, sizeof quads);
        for (int i = 0; i < 4; i++) {
            I32 weight = quads << (24 - 8 * i) >> 24;
            sums += weight * int32_t(x >> (8 * i) & 0xFF);
        }
        return sums;
#endif
    }
};

template <class Format>
inline int64_t panel_rows(int64_t k) {
    return round_up((k + Format::GROUP - 1) / Format::GROUP, TILE_ROWS);
}
