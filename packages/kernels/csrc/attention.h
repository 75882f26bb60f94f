// Attention over paged keys and values; algorithm in attention.cpp.
#pragma once

#include <cstdint>

// One layer's cache, [pages, page_size, kv_heads, head_dim] for keys and for values; format FLOAT32 or BFLOAT16. A value
// is the first `value_dim` elements: all of them, but where `v` is `k` and values are a part of keys.
struct Cache {
    char* k;
    char* v;
    int64_t format;
    int64_t pages, page_size, kv_heads, head_dim, value_dim;
};

// The rows of a step: see AttentionBatch in attention/api.py.
struct Rows {
    int64_t rows, tokens;
    const int32_t* query_start;  // [rows + 1]
    const int32_t* kv_lens;      // [rows]
    const int32_t* page_table;   // [rows, page_stride]
    int64_t page_stride;
    const int64_t* slot_mapping;  // [tokens]
    const int32_t* seen;          // [tokens], or null: how many tokens of its row each sees
};

struct Scoring {
    float scale;
    float softcap;       // 0: none
    int64_t window;      // 0: none
    const float* sinks;  // [heads], or null
};

// q is [tokens, heads, head_dim] and out [tokens, heads, value_dim], with token strides `q_stride` and `out_stride`.
struct AttentionOperands {
    const float* q;
    int64_t q_stride;
    const Cache& cache;
    const Rows& rows;
    const Scoring& scoring;
    int64_t heads;
    float* out;
    int64_t out_stride;
};

void attend(const AttentionOperands& operands);
