// Choosing tokens: see ops/sampling.py and ops/philox.py, which define these to the bit.
#pragma once

#include <cstdint>

#include "noise.h"

// The first index of a row's largest element, which goes to `most`.
int64_t argmax_row(const float* row, int64_t n, float* most);

// The largest of each row and the lowest index that has it; a NaN is larger than all.
void argmax(const float* logits, int64_t rows, int64_t vocab, float* most, int64_t* index);

// -inf where the row's mask has a zero bit.
void apply_bitmask(float* logits, int64_t rows, int64_t vocab, const int32_t* mask, int64_t mask_stride);

// Filters of a row; `floor` is the logarithm of min-p.
struct Filter {
    int64_t top_k;  // 0: off
    float top_p;    // 1: off
    float floor;    // -inf: off
};

// Draws a token for each row, -1 without one: temperature, filters, then the largest sum of logit and noise.
void sample(const float* logits, int64_t rows, int64_t vocab, const float* temperature, const Filter* filters,
            const NoiseKey* keys, int64_t* tokens);
