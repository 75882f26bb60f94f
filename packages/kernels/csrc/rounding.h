// Numbers to whole steps: inputs as they are multiplied, and weights as they are packed.
#pragma once

#include <cfloat>

#include "vec.h"

// To the nearest whole number, ties to even; of less than 2^22 in size, and anything where it is more or no number.
inline I32 nearest(F32 x) {
    const F32 magic = broadcast(12582912.0f);  // 1.5 * 2^23: adding it leaves no fraction
    return __builtin_convertvector(x + magic - magic, I32);
}

typedef int8_t S8 __attribute__((vector_size(LANES)));

// The first `count` of them, in their lowest 8 bits.
inline void store_bytes(void* p, I32 x, int64_t count) {
    S8 narrow = __builtin_convertvector(x, S8);
    count == LANES ? std::memcpy(p, &narrow, LANES) : std::memcpy(p, &narrow, size_t(count));
}

// The largest of a row without its sign; NaN for a row with a NaN or an infinity.
template <class T>
float largest(const T* x, int64_t k) {
    F32 most = {}, poison = {};
    over(k, [&](int64_t i, auto get, auto) {
        F32 value = get(x + i);
        most = max(value, max(-value, most));
        poison = poison + value * 0.0f;
    });
    return max(most) + sum(poison);
}

// Rounds a row to 8 bits: what is largest in it becomes 127 or -127, and put(i, steps, count) is told of LANES elements
// from i on, of which `count` are in the row. Returns what a step means, which is NaN where `largest` is.
template <class T, class Put>
float quantize(const T* x, int64_t k, const Put& put) {
    float scale = largest(x, k) / 127.0f;
    float divisor = scale >= FLT_MIN ? scale : FLT_MIN;  // a NaN among them, of which no step counts
    over(k, [&](int64_t i, auto get, auto) { put(i, nearest(get(x + i) / divisor), k - i < LANES ? k - i : LANES); });
    return scale;
}
