// Packing of checkpoint weights: rounding, and repacking into the layout that `multiply` reads.
#pragma once

#include "linear.h"

// Where a matrix goes: panel p of it is panel `start + p * step` of `panels`, and of the arrays beside them.
struct Packing {
    int64_t format;
    int64_t start, step;
    char* panels;
    float* scales;     // int8 only, as in `Linear`
    int32_t* offsets;  // int8 only
};

// Bytes of the packed weights.
int64_t packed_bytes(int64_t n, int64_t k, int64_t format);

// Packs a matrix [n, k] of float32 or bfloat16 (`source`), either rounded to the bits of the packing's format or in that
// format already.
void pack(const void* weight, int64_t source, int64_t n, int64_t k, const Packing& packing);
