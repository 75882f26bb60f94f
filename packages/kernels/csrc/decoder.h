// A decoder-only model: one call computes every layer of a step, so that parallel loops follow each other immediately.
// The struct fields are mirrored in native/abi.py.
#pragma once

#include "attention.h"
#include "linear.h"
#include "lora.h"
#include "mixture.h"

struct Layer {
    Linear qkv, o, gate_up, down;  // gate_up's panels alternate
    const Mixture* mixture;        // or null; where there is one it takes the place of gate_up and down
    const float* input_norm;
    const float* post_norm;
    const float* q_norm;          // or null, as those that follow
    const float* k_norm;
    const float* attention_norm;  // of what attention adds
    const float* mlp_norm;        // of what the MLP adds
    const float* sinks;           // [heads], of attention
    const float* rope;            // [positions, rotary_dim]: cosines, then sines; never null
    Cache cache;
    int64_t window;  // 0: none
    int64_t group;   // which of a step's `Rows`
    const Adapters *qkv_adapters, *o_adapters, *gate_up_adapters, *down_adapters;  // or null; a mixture has no others
};

struct Model {
    int64_t layer_count, hidden, heads, kv_heads, head_dim, vocab;
    int64_t positions, rotary_dim;  // of the tables
    const float* norm;
    const Layer* layers;
    const char* embedding;  // [vocab, hidden], or null where it is the head's weights
    int64_t embedding_format;
    Linear head;
    int64_t gate;  // a `Gate`
    float eps, embedding_scale;
    float attention_scale, softcap;  // as in `Scoring`
};

struct Step {
    int64_t tokens, groups;
    const int64_t* input_ids;
    const int64_t* positions;
    const Rows* rows;  // [groups]
    const AdapterRows* adapted;  // or null: no token has an adapter
    const float* embeddings;     // [replaced, parts, hidden]: those of tokens that are none of the vocabulary's
    const int64_t* places;       // [replaced]: these tokens, ascending
    int64_t replaced, parts;     // parts after the first are added after the first layers (deepstack)
};

// Returns null, or the error of a step. A step that passes touches no memory outside the model's.
const char* find_fault(const Model& model, const Step& step);
const char* find_fault(const Rows& rows, const Cache& cache);

// The normalized hidden states after the last layer, [tokens, hidden]; new keys and values go into the caches.
void forward(const Model& model, const Step& step, float* hidden);

// out [m, n] = x [m, k] @ weight.T + bias.
void linear(const Linear& linear, const float* x, int64_t m, float* out);
