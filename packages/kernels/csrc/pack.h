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

// A matrix [n, k] in blocks: weights are scale * code + minimum.
struct BlockSource {
    int64_t n, k;
    Coding coding;
    const uint8_t* codes;   // 4 bits: [n, k / 2], two in a byte as `pack_int4` of ops/quantized.py has them; 8: [n, k]
    const float* scales;    // [n, blocks]
    const float* minimums;  // [n, blocks], or null: all are zero
};

// Chooses the smallest scale type that holds all scales and minimums exactly, and the zero of a matrix whose bits and
// block are given.
void choose_coding(BlockSource& source);

// Bytes of the packed weights.
int64_t packed_block_bytes(int64_t n, int64_t k, const Coding& coding);

// Packs a matrix in a coding of the same bits and block, whose scale type and zero hold it.
void pack_blocks(const BlockSource& source, const Coding& coding, const Packing& packing);
