// y = x @ weight.T + bias for packed weights: see format.h for the layout.
#pragma once

#include <cstdint>

// BLOCKS and FLOAT_BLOCKS are the weights of blocks.h, with inputs in 8 bits or in float32.
enum Format : int64_t { FLOAT32 = 0, BFLOAT16 = 1, INT8 = 2, INT4 = 3, BLOCKS = 4, FLOAT_BLOCKS = 5 };

// Whose inputs are rounded to 8 bits with a scale for each row or each 32 of its inputs.
inline bool is_quantized(int64_t format) { return format >= INT8; }

// How blocks hold scales and minimums: as int8 multiples of a float32, float16, or float32.
enum ScaleType : int64_t { STEPS = 0, HALVES = 1, SINGLES = 2 };

// How weights in blocks are stored: see blocks.h.
struct Coding {
    int64_t bits;        // of a code: 4, without a sign, or 8, with one
    int64_t block;       // inputs that share a scale: 16 or 32
    int64_t scale_type;  // a `ScaleType`
    int64_t zero;        // the code of zero in all blocks: their minimum is -zero * scale; -1 where blocks have minimums
};

// Weights [n, k], see pack.h. Arrays of n are padded to whole panels.
struct Linear {
    int64_t n, k;
    int64_t format;
    const char* panels;
    const float* scales;     // int8 only: what one step of each output's weights means
    const int32_t* offsets;  // int8 only: 128 * the sum of each output's weights, due to inputs being 128 too large
    const float* bias;       // or null
    Coding coding;           // of blocks only
};

// Inputs in the format of the weights they meet: rows of `stride` bytes, zero past k up to a whole number of tiles.
struct Operand {
    char* rows;
    int64_t stride;
    float* scales;  // of quantized formats: what one step of each row means

    // Those from a row on.
    Operand from(int64_t row) const { return {rows + row * stride, stride, scales + row}; }
};

int64_t operand_stride(int64_t format, int64_t k);

// Writes a row of floats into row m of an operand.
void fill_operand(int64_t format, const float* x, int64_t k, const Operand& operand, int64_t m);

// What a gate goes through before an up is multiplied by it: see `act_and_mul` in ops/activation.py.
enum Gate : int64_t { SILU = 0, GELU_TANH = 1, CLAMPED = 2 };

struct Addend;

// Where products go.
struct Output {
    enum Mode {
        STORE,  // out = product
        ADD,    // out += product
        GATE    // panels alternate between gate and up: out = act(gate) * up, half as wide
    } mode;
    float* out;
    int64_t stride;        // elements between rows of `out`, or bytes between `rows`
    int64_t gate = SILU;   // of GATE
    char* rows = nullptr;  // GATE into rows of an operand for bfloat16 weights, in place of `out`
    const Addend* addend = nullptr;  // of adapters, to be added to the products of some rows: see lora.h
};

void multiply(const Linear& linear, const Operand& x, int64_t m, const Output& output);

// One of several that are multiplied side by side.
struct Product {
    const Linear* linear;
    Operand x;
    int64_t m;
    Output output;
};

// The same for weights of one format, in one parallel loop over the panels of all.
void multiply(const Product* products, int64_t count);

// Row `index` of the matrix, as floats.
void unpack_row(const Linear& linear, int64_t index, float* out);
