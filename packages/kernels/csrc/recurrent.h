// Recurrent layers over states [states, heads, rows, columns]: see ops/recurrent.py, which defines these. Mirrored in
// native/abi.py.
#pragma once

#include <cstdint>

// Consecutive tokens [begin, end) of one sequence, and the state that they advance; `snapshot` gets a copy, unless -1.
// Segments of one state follow each other, in the order of their tokens.
struct Segment {
    int64_t begin, end, state, snapshot;
};

struct Recurrence {
    int64_t heads, groups;  // a group of keys serves consecutive heads
    int64_t rows, columns;  // of a head's state
    int64_t factors;        // of a head: 1, or for the delta rule one of each row
    const float* factor;    // [tokens, heads, factors], of the state
    float* states;
    float* out;
};

// q and k [tokens, groups, rows], v and out [tokens, heads, columns], beta [tokens, heads]. With S the state before a
// token: S' = factor S, S = S' + k (beta (v - k S')), out = q S.
void delta_rule(const Recurrence& recurrence, const Segment* segments, int64_t count, const float* q, const float* k,
                const float* v, const float* beta);

// b and c [tokens, groups, columns], x and out [tokens, heads, rows]: S = factor S + x b, out = S c.
void state_space_scan(const Recurrence& recurrence, const Segment* segments, int64_t count, const float* c,
                      const float* b, const float* x);

// The rows of all heads are channels, and `factor` [channels, columns] is the rate of each. c and b [tokens, columns],
// x, step and out [tokens, channels]: S = exp(step factor) S + step x b, out = S c.
void selective_scan(const Recurrence& recurrence, const Segment* segments, int64_t count, const float* c,
                    const float* b, const float* x, const float* step);
