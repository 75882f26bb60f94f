// Weights of 4 or 8 bits with a scale, and perhaps a minimum, for every 16 or 32 inputs of an output: a weight is
// scale * code + minimum. GGUF files hold such weights.
//
// A panel of 16 outputs is a sequence of chunks of 32 inputs, each of one or two blocks. A chunk holds the scales of its
// first block (16), the minimums of that block if blocks have their own, the same of its second block, and then the
// codes. Codes of 4 bits are 4 rows of 64 bytes: byte 4 * output + i of row r holds input 8 * r + i in its lower half and
// input 8 * r + 4 + i in its upper half. Codes of 8 bits are 8 rows: byte 4 * output + i of row r holds input 4 * r + i.
// Scales that are small multiples of a unit are stored as int8, and the units, one for each 256 inputs, come before the
// chunks: 16 units of scales, then 16 units of minimums.
#pragma once

#include "format.h"
#include "linear.h"
#include "row_groups.h"

namespace blocks {

constexpr int64_t CHUNK = 32;                   // inputs
constexpr int64_t SUPER_BLOCK = 256;            // inputs that share units
constexpr int64_t AHEAD = 16;                   // chunks to prefetch, of all panels together
constexpr int TOGETHER = 2;                     // vectors of outputs that meet a word of inputs; as registers have room
constexpr int MANY_ROWS = LANES == 16 ? 6 : 4;  // of inputs that share a look at TOGETHER vectors; measured

inline int64_t chunks(int64_t k) { return (k + CHUNK - 1) / CHUNK; }

inline bool has_minimums(const Coding& coding) { return coding.zero < 0; }

// Offsets in the panels of a matrix.
struct Layout {
    Coding coding;
    int64_t chunks;
    int64_t values;  // bytes of the scales, or of the minimums, of a block
    int64_t each;    // bytes of all that a block has beside codes
    int64_t units;   // bytes of the units of 256 inputs
    int64_t codes;   // where codes begin in a chunk
    int64_t chunk;   // bytes of a chunk
    int64_t first;   // where the first chunk begins
    int64_t panel;   // bytes of a panel

    Layout(const Coding& coding, int64_t k) : coding(coding), chunks(blocks::chunks(k)) {
        int64_t arrays = has_minimums(coding) ? 2 : 1;
        values = PANEL * (coding.scale_type == STEPS ? 1 : coding.scale_type == HALVES ? 2 : 4);
        each = arrays * values;
        units = coding.scale_type == STEPS ? arrays * PANEL * 4 : 0;
        codes = CHUNK / coding.block * each;
        chunk = codes + CHUNK * PANEL * coding.bits / 8;
        first = (k + SUPER_BLOCK - 1) / SUPER_BLOCK * units;
        panel = first + chunks * chunk;
    }

    int64_t at(int64_t index) const { return first + index * chunk; }
};

// A row of inputs in 8 bits: int8 of all chunks; then the step of each chunk as float32; the sums of chunks and of their
// halves, in steps as int32, and as float32.
struct InputLayout {
    int64_t steps, totals, half_totals, sums, half_sums, bytes;

    explicit InputLayout(int64_t k) {
        int64_t count = chunks(k);
        steps = count * CHUNK;
        totals = steps + 4 * count;
        half_totals = totals + 4 * count;
        sums = half_totals + 8 * count;
        half_sums = sums + 4 * count;
        bytes = odd_lines(half_sums + 8 * count);
    }

    // Of the arrays for blocks of a size.
    int64_t totals_of(int64_t block) const { return block == CHUNK ? totals : half_totals; }
    int64_t sums_of(int64_t block) const { return block == CHUNK ? sums : half_sums; }
};

inline float number(const char* p) {
    float x;
    std::memcpy(&x, p, sizeof x);
    return x;
}

__attribute__((always_inline)) inline F32 halves_to_floats(const char* p) {
    U16 halves = vector<U16>(p);
#if defined(__AVX512F__)
    return (F32)_mm512_maskz_cvtph_ps(__mmask16(-1), (__m256i)halves);  // GCC 12 warns where there is no mask
#elif defined(__F16C__)
    return (F32)_mm256_cvtph_ps((__m128i)halves);
#else
    U32 bits = __builtin_convertvector(halves, U32), exponent = bits & 0x7C00u;
    F32 normal = bit_cast<F32>(((bits & 0x7FFFu) << 13) + (112u << 23));
    F32 small = __builtin_convertvector(bit_cast<I32>(bits & 0x3FFu), F32) * 5.9604645e-8f;  // 2^-24
    U32 size = exponent == 0 ? bit_cast<U32>(small) : bit_cast<U32>(normal);
    return bit_cast<F32>(size | (bits & 0x8000u) << 16);
#endif
}

__attribute__((always_inline)) inline F32 bytes_to_floats(const char* p) {
#if defined(__AVX512F__)
    __m512i wide = _mm512_maskz_cvtepi8_epi32(__mmask16(-1), vector<__m128i>(p));
    return __builtin_convertvector((I32)wide, F32);
#elif defined(__AVX2__)
    return (F32)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_set1_epi64x(vector<int64_t>(p))));
#else
    typedef int8_t S8 __attribute__((vector_size(LANES)));
    return __builtin_convertvector(vector<S8>(p), F32);
#endif
}

// LANES scales or minimums from `p` on, and the units at `unit`.
__attribute__((always_inline)) inline F32 read_values(const char* p, const char* unit, int64_t scale_type, int64_t lane) {
    switch (scale_type) {
        case STEPS: return bytes_to_floats(p + lane) * vector<F32>(unit + 4 * lane);
        case HALVES: return halves_to_floats(p + 2 * lane);
        default: return vector<F32>(p + 4 * lane);
    }
}

// Scale and minimum of LANES outputs of a panel in block `block` of a chunk.
struct Factors {
    F32 scale, minimum;

    __attribute__((always_inline)) Factors(const Layout& layout, const char* panel, int64_t chunk, int64_t block,
                                           int64_t lane) {
        const Coding& coding = layout.coding;
        const char* at = panel + layout.at(chunk) + block * layout.each;
        const char* unit = panel + chunk / (SUPER_BLOCK / CHUNK) * layout.units;
        scale = read_values(at, unit, coding.scale_type, lane);
        if (has_minimums(coding))
            minimum = read_values(at + layout.values, unit + 4 * PANEL, coding.scale_type, lane);
        else
            minimum = scale * float(-coding.zero);
    }

    // Adds a block to the sums of a row: `total` has its codes, less the zero, times inputs, and `sum` the inputs of
    // blocks with minimums. The order of operations is the same for every number of rows.
    F32 add(F32 sums, I32 total, float step) const { return __builtin_convertvector(total, F32) * step * scale + sums; }
    F32 add(F32 sums, I32 total, float step, float sum) const { return minimum * sum + add(sums, total, step); }
};

// Products of 4 codes of each output with 4 inputs of 8 bits, added up. SHIFT is added to codes to make them what the
// processor multiplies. Where FROM_START, sums begin with `start`; else it is added in the end.
template <int BITS>
struct Dot;

#if defined(TERCET_VNNI)
template <int BITS>
struct Dot {
    typedef I32 Total;
    static constexpr int SHIFT = BITS == 8 ? 128 : 0;
    static constexpr bool FROM_START = true;
    static inline U32 prepare(U32 codes) { return BITS == 8 ? codes ^ 0x80808080u : codes; }
    static inline Total add(Total total, U32 codes, I32 x) { return add_products(total, codes, bit_cast<U32>(x)); }
    static inline I32 whole(Total total) { return total; }
};
#elif defined(__AVX2__)
template <>
struct Dot<4> {
    typedef S16 Total;  // of a whole block: 8 times 2 * 15 * 127 at most
    static constexpr int SHIFT = 0;
    static constexpr bool FROM_START = false;
    static inline U32 prepare(U32 codes) { return codes; }
    static inline Total add(Total total, U32 codes, I32 x) {
        return total + (S16)_mm256_maddubs_epi16((__m256i)codes, (__m256i)x);
    }
    static inline I32 whole(Total total) { return (I32)_mm256_madd_epi16((__m256i)total, _mm256_set1_epi16(1)); }
};
template <>
struct Dot<8> {
    typedef I32 Total;
    static constexpr int SHIFT = 0;
    static constexpr bool FROM_START = false;
    static inline U32 prepare(U32 codes) { return codes; }
    static inline Total add(Total total, U32 codes, I32 x) {
        __m256i weights = (__m256i)codes, inputs = _mm256_sign_epi8((__m256i)x, weights);
        __m256i pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(weights), inputs);
        return total + (I32)_mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
    }
    static inline I32 whole(Total total) { return total; }
};
#else
template <int BITS>
struct Dot {
    typedef I32 Total;
    static constexpr int SHIFT = 0;
    static constexpr bool FROM_START = false;
    static inline U32 prepare(U32 codes) { return codes; }
    static inline Total add(Total total, U32 codes, I32 x) {
        for (int i = 0; i < 4; i++)
            total += (bit_cast<I32>(codes << (24 - 8 * i)) >> 24) * (bit_cast<I32>(bit_cast<U32>(x) << (24 - 8 * i)) >> 24);
        return total;
    }
    static inline I32 whole(Total total) { return total; }
};
#endif

// The number by which a code exceeds its value as it is multiplied.
inline int32_t excess_of(const Coding& coding) {
    int shift = coding.bits == 4 ? Dot<4>::SHIFT : Dot<8>::SHIFT;
    return shift + int32_t(has_minimums(coding) ? 0 : coding.zero);
}

// Codes of LANES outputs for 4 inputs of a chunk: those from 4 * group on.
template <int BITS>
inline U32 read_codes(const char* codes, int64_t group, int64_t lane) {
    if constexpr (BITS == 4) {
        U32 pairs = vector<U32>(codes + group / 2 * ROW_BYTES + 4 * lane);
        return (group % 2 ? pairs >> 4 : pairs) & 0x0F0F0F0Fu;
    } else {
        return vector<U32>(codes + group * ROW_BYTES + 4 * lane);
    }
}

// A block of inputs in 8 bits: what its sums of products begin with, its step, and its sum.
struct InputBlock {
    int32_t start;
    float step, sum;
};

// Writes the blocks of rows of inputs: [blocks][rows].
inline void write_input_blocks(const Layout& layout, const char* x, int64_t stride, int64_t rows, InputBlock* out) {
    const Coding& coding = layout.coding;
    const InputLayout inputs(layout.chunks * CHUNK);
    const int64_t each = CHUNK / coding.block;
    const int32_t excess = excess_of(coding);
    for (int64_t row = 0; row < rows; row++, x += stride)
        for (int64_t block = 0; block < layout.chunks * each; block++)
            out[block * rows + row] = {-excess * word(x + inputs.totals_of(coding.block) + 4 * block),
                                       number(x + inputs.steps + 4 * (block / each)),
                                       number(x + inputs.sums_of(coding.block) + 4 * block)};
}

// What a call multiplies.
struct Operands {
    const Layout& layout;
    const char* x;
    int64_t stride;
    const char* panels;
    const InputBlock* input_blocks;  // of inputs in 8 bits: [blocks][rows]
    int64_t rows;
    Factors* factors;  // those of the panels, where the first rows write them for the others: [panel][block][PARTS]
    bool fresh;        // whether these are the first rows that meet the panels
};

inline void prefetch(const Layout& layout, const char* chunk, int64_t index, int width) {
    int64_t soon = AHEAD / width, next = index + soon < layout.chunks ? 0 : (width - 1) * layout.panel;
    for (int64_t byte = 0; byte < layout.chunk; byte += ROW_BYTES)
        __builtin_prefetch(chunk + soon * layout.chunk + next + byte);
}

// ROWS rows of inputs in 8 bits times WIDTH panels, which are read side by side.
template <int BITS, int BLOCK, int ROWS, int WIDTH, bool FRESH>
inline void block(const Operands& given, F32* out, int64_t out_stride) {
    using Multiply = Dot<BITS>;
    constexpr int VECTORS = WIDTH * PARTS, MOST = ROWS == 1 ? 4 : TOGETHER, BESIDE = MOST < VECTORS ? MOST : VECTORS;
    const Layout& layout = given.layout;
    const bool minimums = has_minimums(layout.coding);
    const bool starts_late = !Multiply::FROM_START && excess_of(layout.coding);
    const int64_t all_blocks = layout.chunks * (CHUNK / BLOCK);
    const InputBlock* own = given.input_blocks;
    F32 sums[ROWS][VECTORS] = {};
    for (int64_t chunk = 0; chunk < layout.chunks; chunk++) {
        const char* chunks = given.panels + layout.at(chunk);
        if constexpr (FRESH)
            for (int panel = 0; panel < WIDTH; panel++) prefetch(layout, chunks + panel * layout.panel, chunk, WIDTH);
        UNROLLED for (int part = 0; part < CHUNK / BLOCK; part++, own += given.rows)
            UNROLLED for (int first = 0; first < VECTORS; first += BESIDE) {
                typename Multiply::Total totals[ROWS][BESIDE];
                UNROLLED for (int row = 0; row < ROWS; row++)
                    UNROLLED for (int i = 0; i < BESIDE; i++)
                        totals[row][i] = typename Multiply::Total{} + (Multiply::FROM_START ? own[row].start : 0);
                UNROLLED for (int group = part * BLOCK / 4; group < (part + 1) * BLOCK / 4; group++) {
                    U32 codes[BESIDE];
                    UNROLLED for (int i = 0; i < BESIDE; i++) {
                        const char* from = chunks + (first + i) / PARTS * layout.panel + layout.codes;
                        codes[i] = Multiply::prepare(read_codes<BITS>(from, group, (first + i) % PARTS * LANES));
                    }
                    UNROLLED for (int row = 0; row < ROWS; row++) {
                        I32 x = I32{} + word(given.x + row * given.stride + chunk * CHUNK + 4 * group);
                        UNROLLED for (int i = 0; i < BESIDE; i++)
                            totals[row][i] = settled(Multiply::add(totals[row][i], codes[i], x));
                    }
                }
                UNROLLED for (int i = 0; i < BESIDE; i++) {
                    int panel = (first + i) / PARTS, vector = (first + i) % PARTS;
                    int64_t index = panel * all_blocks + chunk * (CHUNK / BLOCK) + part;
                    Factors* known = given.factors + index * PARTS + vector;
                    Factors factors =
                        FRESH ? Factors(layout, given.panels + panel * layout.panel, chunk, part, vector * LANES) : *known;
                    if (FRESH && ROWS > 1 && given.rows > ROWS) *known = factors;
                    UNROLLED for (int row = 0; row < ROWS; row++) {
                        I32 total = Multiply::whole(totals[row][i]);
                        if (starts_late) total += own[row].start;
                        F32& sum = sums[row][first + i];
                        sum = minimums ? factors.add(sum, total, own[row].step, own[row].sum)
                                       : factors.add(sum, total, own[row].step);
                    }
                }
            }
    }
    for (int row = 0; row < ROWS; row++)
        for (int i = 0; i < VECTORS; i++) out[row * out_stride + i] = sums[row][i];
}

// The weights of a chunk of a panel, as floats: [CHUNK][PARTS].
template <int BITS, int BLOCK>
inline void dequantize(const Layout& layout, const char* panel, int64_t chunk, F32* out) {
    for (int part = 0; part < PARTS; part++)
        for (int64_t block = 0; block < CHUNK / BLOCK; block++) {
            int64_t lane = part * LANES;
            Factors factors(layout, panel, chunk, block, lane);
            for (int64_t group = block * BLOCK / 4; group < (block + 1) * BLOCK / 4; group++) {
                U32 codes = read_codes<BITS>(panel + layout.at(chunk) + layout.codes, group, lane);
                UNROLLED for (int i = 0; i < 4; i++) {
                    I32 value = bit_cast<I32>(codes << (24 - 8 * i)) >> 24;
                    out[(4 * group + i) * PARTS + part] =
                        __builtin_convertvector(value, F32) * factors.scale + factors.minimum;
                }
            }
        }
}

// ROWS rows of float32 inputs times WIDTH panels.
template <int BITS, int BLOCK, int ROWS, int WIDTH>
inline void block_of_floats(const Operands& given, F32* out, int64_t out_stride) {
    F32 sums[ROWS][WIDTH * PARTS] = {}, weights[CHUNK * PARTS];
    for (int64_t chunk = 0; chunk < given.layout.chunks; chunk++)
        for (int panel = 0; panel < WIDTH; panel++) {
            dequantize<BITS, BLOCK>(given.layout, given.panels + panel * given.layout.panel, chunk, weights);
            for (int64_t input = 0; input < CHUNK; input++)
                for (int row = 0; row < ROWS; row++) {
                    float x = number(given.x + row * given.stride + 4 * (chunk * CHUNK + input));
                    for (int part = 0; part < PARTS; part++)
                        sums[row][panel * PARTS + part] =
                            weights[input * PARTS + part] * x + sums[row][panel * PARTS + part];
                }
        }
    for (int row = 0; row < ROWS; row++)
        for (int i = 0; i < WIDTH * PARTS; i++) out[row * out_stride + i] = sums[row][i];
}

template <bool INTEGER, int BITS, int BLOCK, int ROWS, int WIDTH>
inline void one(const Operands& given, F32* out, int64_t out_stride) {
    if constexpr (INTEGER)
        given.fresh ? block<BITS, BLOCK, ROWS, WIDTH, true>(given, out, out_stride)
                    : block<BITS, BLOCK, ROWS, WIDTH, false>(given, out, out_stride);
    else
        block_of_floats<BITS, BLOCK, ROWS, WIDTH>(given, out, out_stride);
}

// `rows` rows, at most TALL at a time.
template <bool INTEGER, int BITS, int BLOCK, int TALL, int WIDTH>
inline void multiply_rows(Operands given, int rows, F32* out, int64_t out_stride) {
    for_row_groups<TALL>(rows, [&](auto height, int first) {
        one<INTEGER, BITS, BLOCK, height, WIDTH>(given, out + first * out_stride, out_stride);
        given.x += height * given.stride, given.input_blocks += height, given.fresh = false;
    });
}

// Not inlined, so that it is compiled once for all callers.
template <bool INTEGER, int BITS, int BLOCK>
__attribute__((noinline)) void multiply_panels(Operands given, int rows, int width, F32* out, int64_t out_stride) {
    if (rows == 1 && width == 4) return one<INTEGER, BITS, BLOCK, 1, 4>(given, out, out_stride);
    constexpr int BESIDE = INTEGER && PARTS == 1 ? TOGETHER : 1;
    for (; width >= BESIDE; width -= BESIDE, out += BESIDE * PARTS) {
        multiply_rows<INTEGER, BITS, BLOCK, MANY_ROWS, BESIDE>(given, rows, out, out_stride);
        given.panels += BESIDE * given.layout.panel;
        given.factors += BESIDE * given.layout.chunks * (CHUNK / BLOCK) * PARTS;
    }
    if (width) multiply_rows<INTEGER, BITS, BLOCK, MANY_ROWS, 1>(given, rows, out, out_stride);
}

// out [rows][width * PARTS] = x [rows] @ panels [width]. INTEGER: inputs are in 8 bits, else in float32.
template <bool INTEGER>
inline void multiply(const Operands& given, int rows, int width, F32* out, int64_t out_stride) {
    const Coding& coding = given.layout.coding;
    if (coding.bits == 4 && coding.block == 16) return multiply_panels<INTEGER, 4, 16>(given, rows, width, out, out_stride);
    if (coding.bits == 4) return multiply_panels<INTEGER, 4, 32>(given, rows, width, out, out_stride);
    if (coding.block == 16) return multiply_panels<INTEGER, 8, 16>(given, rows, width, out, out_stride);
    multiply_panels<INTEGER, 8, 32>(given, rows, width, out, out_stride);
}

// Output `output` of a panel, as floats.
template <int BITS, int BLOCK>
inline void unpack(const Layout& layout, const char* panel, int64_t output, int64_t k, float* out) {
    F32 weights[CHUNK * PARTS];
    for (int64_t chunk = 0; chunk < layout.chunks; chunk++) {
        dequantize<BITS, BLOCK>(layout, panel, chunk, weights);
        for (int64_t i = 0; i < CHUNK && chunk * CHUNK + i < k; i++)
            out[chunk * CHUNK + i] = weights[i * PARTS + output / LANES][output % LANES];
    }
}

inline void unpack(const Layout& layout, const char* panel, int64_t output, int64_t k, float* out) {
    const Coding& coding = layout.coding;
    if (coding.bits == 4 && coding.block == 16) return unpack<4, 16>(layout, panel, output, k, out);
    if (coding.bits == 4) return unpack<4, 32>(layout, panel, output, k, out);
    if (coding.block == 16) return unpack<8, 16>(layout, panel, output, k, out);
    unpack<8, 32>(layout, panel, output, k, out);
}

}  // namespace blocks

// What loops over all formats need to know.
struct Blocks {
    using Element = uint8_t;
    using Input = int8_t;
    using Sums = F32;
    static constexpr int GROUP = 32;
};

// The same with inputs in float32.
struct BlocksOfFloats {
    using Element = uint8_t;
    using Input = float;
    using Sums = F32;
    static constexpr int GROUP = 32;
};
