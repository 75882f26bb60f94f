// Vectors of floats, as wide as the instruction set this file is compiled for.
//
// Every kernel is written once on these few functions and compiled once per instruction set, each time into a library
// of its own, so no two versions of a function ever meet. GCC's and Clang's vector extension gives + - * < and
// indexing; a * b + c becomes a fused multiply-add where there is one.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__SSE2__)
#include <immintrin.h>
#endif

#if defined(__AVX512F__)
constexpr int LANES = 16;
#elif defined(__AVX2__)
constexpr int LANES = 8;
#else
constexpr int LANES = 4;
#endif

typedef float F32 __attribute__((vector_size(4 * LANES)));
typedef int32_t I32 __attribute__((vector_size(4 * LANES)));
typedef uint32_t U32 __attribute__((vector_size(4 * LANES)));
typedef uint16_t U16 __attribute__((vector_size(2 * LANES)));
typedef int16_t S16 __attribute__((vector_size(4 * LANES)));

// Before a loop over registers.
#define UNROLLED _Pragma("GCC unroll 16")

// Has a sum be whole before the compiler begins with the next: left to itself it starts on many, and runs out of
// registers.
template <class Sums>
inline Sums settled(Sums sums) {
#if defined(__AVX2__) && !defined(__AVX512F__)
    asm volatile("" : "+x"(sums));
#endif
    return sums;
}

struct Bf16 {
    uint16_t bits;
};

// A bfloat16 that is kept as a float32.
struct WideBf16 {
    float value;
};

template <class To, class From>
inline To bit_cast(const From& from) {
    static_assert(sizeof(To) == sizeof(From), "only between types of one size");
    To to;
    std::memcpy(&to, &from, sizeof to);
    return to;
}

inline F32 broadcast(float x) { return F32{} + x; }
inline U32 broadcast(uint32_t x) { return U32{} + x; }

// bfloat16 is the upper half of a float32.

inline float to_float(float x) { return x; }
inline float to_float(WideBf16 x) { return x.value; }
inline float to_float(Bf16 x) { return bit_cast<float>(uint32_t(x.bits) << 16); }

inline Bf16 to_bf16(float x) {  // to nearest, ties to even; a NaN stays one
    uint32_t bits = bit_cast<uint32_t>(x);
    if (x != x) return {uint16_t(bits >> 16 | 0x40)};
    return {uint16_t((bits + 0x7FFF + (bits >> 16 & 1)) >> 16)};
}

inline void set(float& to, float x) { to = x; }
inline void set(Bf16& to, float x) { to = to_bf16(x); }
inline void set(WideBf16& to, float x) { to.value = to_float(to_bf16(x)); }

inline F32 load(const float* p) {
    F32 x;
    std::memcpy(&x, p, sizeof x);
    return x;
}

inline F32 load(const Bf16* p) {
    U16 half;
    std::memcpy(&half, p, sizeof half);
    return bit_cast<F32>(__builtin_convertvector(half, U32) << 16);
}

inline void store(float* p, F32 x) { std::memcpy(p, &x, sizeof x); }

// See `to_bf16`.
inline U32 bf16_bits(F32 x) {
    U32 bits = bit_cast<U32>(x);
    U32 rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
    U32 nan = bits >> 16 | 0x40;
    return x == x ? rounded : nan;
}

inline void store(Bf16* p, F32 x) {
#if defined(__AVX512BF16__)
    U16 half = (U16)_mm512_cvtneps_pbh((__m512)x);  // zero for what is subnormal, as products take it to be
#else
    U16 half = __builtin_convertvector(bf16_bits(x), U16);
#endif
    std::memcpy(p, &half, sizeof half);
}

inline void store(WideBf16* p, F32 x) { store(&p->value, bit_cast<F32>(bf16_bits(x) << 16)); }

// The first `count` < LANES elements; the others are zero.
template <class T>
inline F32 load_some(const T* p, int64_t count) {
    float x[LANES] = {};
    for (int64_t i = 0; i < count; i++) x[i] = to_float(p[i]);
    return load(x);
}

template <class T>
inline void store_some(T* p, F32 x, int64_t count) {
    float all[LANES];
    store(all, x);
    for (int64_t i = 0; i < count; i++) set(p[i], all[i]);
}

// The first `count` <= LANES elements, all of them at once where they are whole.
template <class T>
inline F32 load_first(const T* p, int64_t count) {
    return count == LANES ? load(p) : load_some(p, count);
}

template <class T>
inline void store_first(T* p, F32 x, int64_t count) {
    count == LANES ? store(p, x) : store_some(p, x, count);
}

// Calls step(i, load, store) over n elements, a vector at a time, where load(p) and store(p, x) reach elements i and
// on of an array. What is past the end loads as zero.
template <class Step>
inline void over(int64_t n, Step step) {
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES)
        step(i, [](const auto* p) { return load(p); }, [](auto* p, F32 x) { store(p, x); });
    if (int64_t rest = n - i)
        step(
            i, [rest](const auto* p) { return load_some(p, rest); },
            [rest](auto* p, F32 x) { store_some(p, x, rest); });
}

// Adds to each lane the products of four bytes without a sign and four with one.
#if defined(__AVX512VNNI__)
#define TERCET_VNNI
inline I32 add_products(I32 sums, U32 unsigned_bytes, U32 signed_bytes) {
    return (I32)_mm512_dpbusd_epi32((__m512i)sums, (__m512i)unsigned_bytes, (__m512i)signed_bytes);
}
#elif defined(__AVXVNNI__)
#define TERCET_VNNI
inline I32 add_products(I32 sums, U32 unsigned_bytes, U32 signed_bytes) {
    return (I32)_mm256_dpbusd_avx_epi32((__m256i)sums, (__m256i)unsigned_bytes, (__m256i)signed_bytes);
}
#endif

// For each lane a0 * b0 + a1 * b1 of the pairs of 16 bits in it.
inline I32 pair_dot(S16 a, I32 b) {
#if defined(__AVX2__) && !defined(__AVX512F__)
    return (I32)_mm256_madd_epi16((__m256i)a, (__m256i)b);
#elif defined(__SSE2__) && !defined(__AVX2__)
    return (I32)_mm_madd_epi16((__m128i)a, (__m128i)b);
#else
    I32 pairs = bit_cast<I32>(a);
    return (pairs << 16 >> 16) * (b << 16 >> 16) + (pairs >> 16) * (b >> 16);
#endif
}

inline F32 max(F32 a, F32 b) { return a > b ? a : b; }

template <int COUNT>
struct Floats32 {
    typedef float Vector __attribute__((vector_size(4 * COUNT)));
};

// All lanes put together: one half with the other, and so on, in few steps that wait for one another.
template <int COUNT, class Join>
inline float folded(typename Floats32<COUNT>::Vector x, Join join) {
    if constexpr (COUNT == 2) {
        return join(x[0], x[1]);
    } else {
        typename Floats32<COUNT / 2>::Vector low, high;
        std::memcpy(&low, &x, sizeof low);
        std::memcpy(&high, reinterpret_cast<const char*>(&x) + sizeof low, sizeof high);
        return folded<COUNT / 2>(join(low, high), join);
    }
}

inline float sum(F32 x) {
    return folded<LANES>(x, [](auto a, auto b) { return a + b; });
}

inline float max(F32 x) {
    return folded<LANES>(x, [](auto a, auto b) { return a > b ? a : b; });
}

// e to the x, to about 2 units in the last place; below -87 it is 0. x = n ln 2 + r, and e^r is a polynomial (Cephes).
__attribute__((always_inline)) inline F32 exp(F32 x) {
    F32 bounded = x > broadcast(88.3f) ? broadcast(88.3f) : x;
    bounded = bounded < broadcast(-88.0f) ? broadcast(-88.0f) : bounded;  // a NaN passes both
    const F32 magic = broadcast(12582912.0f);                             // 1.5 * 2^23: adding it rounds to an integer
    F32 shifted = bounded * 1.44269504f + magic;
    F32 n = shifted - magic;
    F32 r = bounded - n * 0.693359375f;
    r = r - n * -2.12194440e-4f;
    F32 p = broadcast(1.9875691500e-4f);
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * (r * r) + r + 1.0f;
    U32 exponent = bit_cast<U32>(shifted) - 0x4B400000u + 127u;
    F32 result = p * bit_cast<F32>(exponent << 23);
    return x < broadcast(-87.0f) ? F32{} : result;
}

inline F32 silu(F32 x) { return x / (exp(-x) + 1.0f); }

inline F32 tanh(F32 x) { return 1.0f - 2.0f / (exp(x * 2.0f) + 1.0f); }

// 0, 1, 2, ...
inline I32 lanes() {
    I32 x;
    for (int i = 0; i < LANES; i++) x[i] = i;
    return x;
}

// Elements of a, and from number LANES on of b.
template <int... INDEX>
inline F32 shuffle(F32 a, F32 b) {
#if defined(__clang__) || __GNUC__ >= 12
    return __builtin_shufflevector(a, b, INDEX...);
#else
    return __builtin_shuffle(a, b, I32{INDEX...});
#endif
}

// a0 b0 a1 b1 ... of the lower or the upper halves of a and b.
#if defined(__AVX512F__)
#define TERCET_LOWER 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23
#define TERCET_UPPER 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31
#elif defined(__AVX2__)
#define TERCET_LOWER 0, 8, 1, 9, 2, 10, 3, 11
#define TERCET_UPPER 4, 12, 5, 13, 6, 14, 7, 15
#else
#define TERCET_LOWER 0, 4, 1, 5
#define TERCET_UPPER 2, 6, 3, 7
#endif
inline F32 interleave_lower(F32 a, F32 b) { return shuffle<TERCET_LOWER>(a, b); }
inline F32 interleave_upper(F32 a, F32 b) { return shuffle<TERCET_UPPER>(a, b); }

// Turns LANES rows into columns.
#if defined(__AVX2__) && !defined(__AVX512F__)
// Elements, then pairs of them change places inside of each half of a vector, and halves at last: whole vectors are
// interleaved in three steps here, halves in one.
inline void transpose(F32 (&rows)[LANES]) {
    F32 pairs[LANES], quads[LANES];
    for (int i = 0; i < LANES; i += 2) {
        pairs[i] = shuffle<0, 8, 1, 9, 4, 12, 5, 13>(rows[i], rows[i + 1]);
        pairs[i + 1] = shuffle<2, 10, 3, 11, 6, 14, 7, 15>(rows[i], rows[i + 1]);
    }
    for (int i = 0; i < LANES; i += 4)
        for (int j = 0; j < 2; j++) {
            F32 left = pairs[i + j], right = pairs[i + j + 2];
            quads[i + 2 * j] = shuffle<0, 1, 8, 9, 4, 5, 12, 13>(left, right);
            quads[i + 2 * j + 1] = shuffle<2, 3, 10, 11, 6, 7, 14, 15>(left, right);
        }
    for (int i = 0; i < 4; i++) {
        rows[i] = shuffle<0, 1, 2, 3, 8, 9, 10, 11>(quads[i], quads[i + 4]);
        rows[i + 4] = shuffle<4, 5, 6, 7, 12, 13, 14, 15>(quads[i], quads[i + 4]);
    }
}
#else
// Interleaving the first half of the rows with the second moves every element's index round by one bit, and after
// log2(LANES) times row and column have changed places.
inline void transpose(F32 (&rows)[LANES]) {
    for (int stage = 1; stage < LANES; stage *= 2) {
        F32 next[LANES];
        for (int i = 0; i < LANES / 2; i++) {
            next[2 * i] = interleave_lower(rows[i], rows[i + LANES / 2]);
            next[2 * i + 1] = interleave_upper(rows[i], rows[i + LANES / 2]);
        }
        for (int i = 0; i < LANES; i++) rows[i] = next[i];
    }
}
#endif
