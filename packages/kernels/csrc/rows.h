// What is done to one row of floats: norms, rotations. Parallel loops over rows are the callers'.
#pragma once

#include "vec.h"

// 1 / sqrt(mean(x * x) + eps).
template <class X>
inline float rms_factor(const X* x, int64_t n, float eps) {
    F32 squares = {};
    over(n, [&](int64_t i, auto get, auto) {
        F32 value = get(x + i);
        squares = value * value + squares;
    });
    return 1.0f / std::sqrt(sum(squares) / float(n) + eps);
}

// weight * x / sqrt(mean(x * x) + eps); in place if out is x.
template <class X, class Weight, class Out>
inline void rmsnorm_row(const X* x, const Weight* weight, int64_t n, float eps, Out* out) {
    float factor = rms_factor(x, n, eps);
    over(n, [&](int64_t i, auto get, auto put) { put(out + i, get(x + i) * factor * get(weight + i)); });
}

// The same, added to out.
inline void add_rmsnorm_row(const float* x, const float* weight, int64_t n, float eps, float* out) {
    float factor = rms_factor(x, n, eps);
    over(n, [&](int64_t i, auto get, auto put) {
        put(out + i, get(x + i) * factor * get(weight + i) + get(out + i));
    });
}

// act(gate) * weight * x / sqrt(mean(x * x) + eps), where act is silu or the sigmoid.
template <class Weight, class T>
inline void gated_rmsnorm_row(const float* x, const Weight* weight, const T* gate, int64_t n, float eps, bool sigmoid,
                              T* out) {
    float factor = rms_factor(x, n, eps);
    over(n, [&](int64_t i, auto get, auto put) {
        F32 by = get(gate + i), act = sigmoid ? 1.0f / (exp(-by) + 1.0f) : silu(by);
        put(out + i, get(x + i) * factor * get(weight + i) * act);
    });
}

// silu(gate) * up of a row that holds gate in its first half and up in its second.
template <class T>
inline void silu_and_mul_row(const T* x, int64_t n, T* out) {
    over(n, [&](int64_t i, auto get, auto put) { put(out + i, silu(get(x + i)) * get(x + n + i)); });
}

// Rotates the first 2 * half elements of a head, half against half; `table` holds half cosines, then half sines.
template <class X, class Out>
inline void rotate_head(const X* x, const float* table, int64_t half, int64_t head_dim, Out* out) {
    over(half, [&](int64_t i, auto get, auto put) {
        F32 low = get(x + i), high = get(x + half + i), cosine = get(table + i), sine = get(table + half + i);
        put(out + i, low * cosine - high * sine);
        put(out + half + i, high * cosine + low * sine);
    });
    over(head_dim - 2 * half, [&](int64_t i, auto get, auto put) { put(out + 2 * half + i, get(x + 2 * half + i)); });
}

inline void scale_row(float* x, int64_t n, float factor) {
    over(n, [&](int64_t i, auto get, auto put) { put(x + i, get(x + i) * factor); });
}

template <class X, class Out>
inline void copy_row(const X* x, int64_t n, Out* out) {
    over(n, [&](int64_t i, auto get, auto put) { put(out + i, get(x + i)); });
}
