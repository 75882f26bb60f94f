// Low-rank adapters of a linear layer, as defined by `add_lora` of ops/lora.py. `Adapters` and `AdapterRows`
// are mirrored in native/abi.py.
#pragma once

#include <cstdint>

#include "format.h"

// Adapters of one layer, each in its slot. The contents of a slot may change between steps.
struct Adapters {
    int64_t rank;  // maximum rank
    int64_t inputs, outputs;
    int64_t parts;         // projections that the layer is made of
    const int64_t* sizes;  // [parts], outputs of each
    const float* a;        // [slots, parts * rank, inputs]
    const float* b;        // [slots, rank, outputs]
};

// Tokens of a step that have an adapter: segments (runs) in the order of tokens. A run may be empty.
struct AdapterRows {
    int64_t runs, places;  // at least one of each
    const int32_t* table;  // [runs, 3]: slot, first token, one past the last
    const int64_t* ranks;  // [slots], rank of each adapter
};

// Null, or what is wrong with the rows of a step of so many tokens.
const char* find_fault(const AdapterRows& rows, int64_t tokens);

// What a layer's adapters add to its products in a step, as far as it is computed before them.
struct Addend {
    const Adapters* adapters;
    const AdapterRows* rows;
    const float* low;  // x @ a.T of the tokens that have one: a row for each token of the step
    int64_t slots;     // in a row, for each part
};

// Of x [tokens, inputs]. The memory is this thread's, and the next call's.
Addend shrink(const Adapters& adapters, const AdapterRows& rows, const float* x);

// The rest, x @ a.T @ b, of some tokens and panels.
struct Added {
    static constexpr int TOKENS = 32, PANELS = 32;  // at most

    // This thread's, of nothing yet.
    static Added& here();

    int64_t token = 0, panel = 0, end = 0;  // the first of each, and the panel after the last
    bool any[TOKENS];                       // whether a token has an adapter, and values
    F32 values[TOKENS][PANELS * PARTS];

    bool has(int64_t from, int64_t first, int64_t last) const { return token == from && panel <= first && last <= end; }

    // What is added to so many tokens' products with panels [first, last), or as many of them as there is room for.
    // Panels of the layer's parts alternate, or those of a part come after those of another. What a token gets depends
    // neither on other tokens nor on threads.
    void compute(const Addend& addend, int64_t from, int tokens, int64_t first, int64_t last, bool alternate);

    // Of a token by its number among these, from a panel on; null for one that has no adapter.
    const F32* at(int row, int64_t from) const { return any[row] ? values[row] + (from - panel) * PARTS : nullptr; }
};
