// Choosing tokens: see ops/sampling.py and ops/philox.py, which define these to the bit.
#pragma once

#include <cstdint>

// The largest of each row and the lowest index that has it; a NaN is larger than all.
void argmax(const float* logits, int64_t rows, int64_t vocab, float* most, int64_t* index);

// -inf where the row's mask has a zero bit.
void apply_bitmask(float* logits, int64_t rows, int64_t vocab, const int32_t* mask, int64_t mask_stride);

// What keys the noise of a row, beside the token.
struct NoiseKey {
    uint32_t seed_low, seed_high, choice, position;
};

// Standard Gumbel noise of a token.
float gumbel(const NoiseKey& key, uint32_t token);
