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

// An odd number of cache lines, so that rows one below the other do not all go to a few sets of a cache.
inline int64_t odd_lines(int64_t bytes) { return round_up(bytes, ROW_BYTES) | ROW_BYTES; }

// `read` gives the weights of 16 outputs, or of as many as a vector has, and `dot` adds their products with a group of
// inputs to as many sums. Where a processor cannot multiply a group at once this takes several steps. Inputs are laid out
// as they are multiplied, so that a group is broadcast straight from memory.

inline int32_t word(const void* p) {
    int32_t x;
    std::memcpy(&x, p, sizeof x);
    return x;
}

template <class T>
inline T vector(const char* p) {
    T x;
    std::memcpy(&x, p, sizeof x);
    return x;
}

struct Floats {
    using Element = float;
    using Input = float;
    using Sums = F32;
    using Weights = F32;
    static constexpr int GROUP = 1, STEPS = 1;
    static inline Weights read(const char* p, int) { return vector<F32>(p); }
    static inline F32 dot(F32 sums, const Input* x, Weights weights, int) { return weights * x[0] + sums; }
};

struct Bfloats {
    using Element = Bf16;
    using Sums = F32;
    static constexpr int GROUP = 2;
#if defined(__AVX512BF16__)
    using Input = Bf16;
    using Weights = __m512i;
    static constexpr int STEPS = 1;
    static inline Weights read(const char* p, int) { return _mm512_loadu_si512(p); }
    static inline F32 dot(F32 sums, const Input* x, Weights weights, int) {
        return (F32)_mm512_dpbf16_ps((__m512)sums, (__m512bh)_mm512_set1_epi32(word(x)), (__m512bh)weights);
    }
#else
    using Input = WideBf16;
    using Weights = F32;
    static constexpr int STEPS = 2;
    static inline Weights read(const char* p, int step) {
        U32 pairs = vector<U32>(p);
        return bit_cast<F32>(step ? pairs & 0xFFFF0000u : pairs << 16);
    }
    static inline F32 dot(F32 sums, const Input* x, Weights weights, int step) {
        return weights * x[step].value + sums;
    }
#endif
};

// Inputs are kept unsigned, 128 more than their value, because that is what VNNI multiplies by signed weights; the
// excess is taken off in the end (see `Linear::scales`).
struct Bytes {
    using Element = int8_t;
    using Sums = I32;
    static constexpr int GROUP = 4;
#if defined(TERCET_VNNI)
    using Input = uint8_t;
    using Weights = U32;
    static constexpr int STEPS = 1;
    static constexpr int64_t place(int64_t i) { return i; }
    static inline Weights read(const char* p, int) { return vector<U32>(p); }
    static inline I32 dot(I32 sums, const Input* x, Weights weights, int) {
        return add_products(sums, broadcast(uint32_t(word(x))), weights);
    }
#else
    using Input = int16_t;
    using Weights = S16;
    static constexpr int STEPS = 2;
    // Where input i goes: the even ones of a group, then the odd ones, because that is how weights become 16 bits wide.
    static constexpr int64_t place(int64_t i) { return i / 4 * 4 + i % 2 * 2 + i / 2 % 2; }
    static inline Weights read(const char* p, int step) {
        S16 quads = vector<S16>(p);
        return step ? quads >> 8 : quads << 8 >> 8;
    }
    static inline I32 dot(I32 sums, const Input* x, Weights weights, int step) {
        return sums + pair_dot(weights, I32{} + word(x + 2 * step));
    }
#endif
};

template <class Format>
inline int64_t panel_rows(int64_t k) {
    return round_up((k + Format::GROUP - 1) / Format::GROUP, TILE_ROWS);
}

template <class Format>
inline int64_t panel_bytes(int64_t k) {
    return panel_rows<Format>(k) * ROW_BYTES;
}

// Of one row of inputs, in bytes.
template <class Format>
inline int64_t input_bytes(int64_t k) {
    return panel_rows<Format>(k) * Format::GROUP * int64_t(sizeof(typename Format::Input));
}
