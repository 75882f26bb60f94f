// Recurrent layers over states [states, heads, rows, columns]: see ops/recurrent.py, which defines these. Mirrored in
// native/abi.py.
#pragma once

#include <cstdint>

#include "segments.h"

struct Recurrence {
    int64_t heads, groups;  // a group of keys serves consecutive heads
    int64_t rows, columns;  // of a head's state
    int64_t decays;         // of a head: 1, or for the delta rule one of each row
    const float* decay;     // [tokens, heads, decays]: logarithm of the factor of the state
    float* states;
    float* out;
};

// Tokens of the delta rule: q and k [tokens, groups, rows], v [tokens, heads, columns], whose tokens are so many elements
// apart.
struct DeltaRows {
    int64_t format;  // of q, k and v
    int64_t q_stride, k_stride, v_stride;
    const void *q, *k, *v;
    const float* beta;  // [tokens, heads]
};

// out [tokens, heads, columns]. With S the state before a token, f its factor, and q and k normalized: S' = f S,
// S = S' + k (beta (v - k S')), out = q S / sqrt(rows).
void delta_rule(const Recurrence& recurrence, const DeltaRows& tokens, const Segment* segments, int64_t count);

// b and c [tokens, groups, columns], x and out [tokens, heads, rows]: S = factor S + x b, out = S c.
void state_space_scan(const Recurrence& recurrence, const Segment* segments, int64_t count, const float* c,
                      const float* b, const float* x);

// The rows of all heads are channels, and `decay` [channels, columns] is the rate of each. c and b [tokens, columns],
// x, step and out [tokens, channels]: S = exp(step decay) S + step x b, out = S c.
void selective_scan(const Recurrence& recurrence, const Segment* segments, int64_t count, const float* c,
                    const float* b, const float* x, const float* step);
