// The three number formats of weights, and the one layout they share.
//
// A weight matrix [n, k] is cut into panels of 16 outputs. A panel is k / GROUP rows of 64 bytes: row g holds, for each
// of the 16 outputs, the GROUP inputs g * GROUP ... that make up 4 bytes: 1 float32, 2 bfloat16 or 4 int8. So one
// kernel serves all three: broadcast a group of an input row, multiply by a 64-byte row of weights, add to 16 sums. 16
// rows are one AMX tile. What a panel has beyond n outputs and k inputs is zero.
#pragma once

#include "vec.h"

constexpr int PANEL = 16;             // outputs
constexpr int ROW_BYTES = 64;         // of one row of a panel
constexpr int TILE_ROWS = 16;         // rows are padded to a multiple of this
constexpr int PARTS = PANEL / LANES;  // vectors that hold 16 sums

inline int64_t round_up(int64_t x, int64_t to) { return (x + to - 1) / to * to; }

// `dot` adds to 16 sums, or as many as a vector has, the products of a group of inputs and a row of weights. Inputs are
// laid out as they are multiplied, so that a group is broadcast straight from memory.

struct Floats {
    using Element = float;
    using Input = float;
    using Sums = F32;
    static constexpr int GROUP = 1;
    static inline F32 dot(F32 sums, const Input* x, const char* weights) {
        return load(reinterpret_cast<const float*>(weights)) * x[0] + sums;
    }
};

struct Bfloats {
    using Element = Bf16;
    using Sums = F32;
    static constexpr int GROUP = 2;
#if defined(__AVX512BF16__)
    using Input = Bf16;
    static inline F32 dot(F32 sums, const Input* x, const char* weights) {
        int pair;
        std::memcpy(&pair, x, sizeof pair);
        __m512i pairs = _mm512_loadu_si512(weights);
        return (F32)_mm512_dpbf16_ps((__m512)sums, (__m512bh)_mm512_set1_epi32(pair), (__m512bh)pairs);
    }
#else
    using Input = WideBf16;
    static inline F32 dot(F32 sums, const Input* x, const char* weights) {
        U32 pairs;
        std::memcpy(&pairs, weights, sizeof pairs);
        F32 even = bit_cast<F32>(pairs << 16), odd = bit_cast<F32>(pairs & 0xFFFF0000u);
        return odd * x[1].value + (even * x[0].value + sums);
    }
#endif
};

// Inputs are kept unsigned, 128 more than their value, because that is what VNNI multiplies by signed weights; the
// excess is taken off in the end (see `Linear::scales`).
struct Bytes {
    using Element = int8_t;
    using Sums = I32;
    static constexpr int GROUP = 4;
#if defined(__AVX512VNNI__)
    using Input = uint8_t;
    static constexpr int64_t place(int64_t i) { return i; }
    static inline I32 dot(I32 sums, const Input* x, const char* weights) {
        int quad;
        std::memcpy(&quad, x, sizeof quad);
        return (I32)_mm512_dpbusd_epi32((__m512i)sums, _mm512_set1_epi32(quad), _mm512_loadu_si512(weights));
    }
#else
    using Input = int16_t;
    // Where input i goes: the even ones of a group, then the odd ones, because that is how weights become 16 bits wide.
    static constexpr int64_t place(int64_t i) { return i / 4 * 4 + i % 2 * 2 + i / 2 % 2; }
    static inline I32 dot(I32 sums, const Input* x, const char* weights) {
        S16 quads;
        std::memcpy(&quads, weights, sizeof quads);
        int32_t pairs[2];
        std::memcpy(pairs, x, sizeof pairs);
        return sums + pair_dot(quads << 8 >> 8, I32{} + pairs[0]) + pair_dot(quads >> 8, I32{} + pairs[1]);
    }
#endif
};

template <class Format>
inline int64_t panel_rows(int64_t k) {
    return round_up((k + Format::GROUP - 1) / Format::GROUP, TILE_ROWS);
}

// Of one row of inputs, in bytes.
template <class Format>
inline int64_t input_bytes(int64_t k) {
    return panel_rows<Format>(k) * Format::GROUP * int64_t(sizeof(typename Format::Input));
}
