// Weights of 4 bits, with a scale for every 32 inputs of an output.
//
// A panel of 16 outputs is a sequence of blocks of 32 inputs: 16 scales in bfloat16, then 4 rows of 64 bytes. Byte 4 *
// output + i of row r holds input 8 * r + i in its lower half and input 8 * r + 4 + i in its upper half, each as 8 more
// than its value, because weights without a sign times inputs with one is what processors multiply. The 8 are taken off
// through the sum of a block's inputs, which stands beside them in the operand.
#pragma once

#include "format.h"
#include "row_groups.h"

namespace int4 {

constexpr int64_t BLOCK = 32;  // inputs that share a scale
constexpr int64_t BLOCK_BYTES = 2 * PANEL + 4 * ROW_BYTES;
constexpr int64_t AHEAD = 16;  // blocks to prefetch, of all panels together; measured
constexpr int TOGETHER = 2;                       // vectors of outputs that meet a word of inputs; as registers have room
constexpr int MANY_ROWS = LANES == 16 ? 6 : 4;  // of inputs that share a look at TOGETHER vectors; measured

inline int64_t blocks(int64_t k) { return (k + BLOCK - 1) / BLOCK; }
inline int64_t panel_bytes(int64_t k) { return blocks(k) * BLOCK_BYTES; }

// A row of inputs: int8 of all blocks, then for each block -8 times their sum as int32.
inline int64_t operand_stride(int64_t k) { return odd_lines(blocks(k) * (BLOCK + 4)); }

// Input i of an output of a panel.
inline float value(const char* panel, int64_t output, int64_t i) {
    const char* block = panel + i / BLOCK * BLOCK_BYTES;
    int64_t at = i % BLOCK, byte = at / 8 * ROW_BYTES + 4 * output + at % 4;
    int pair = uint8_t(block[2 * PANEL + byte]);
    return to_float(reinterpret_cast<const Bf16*>(block)[output]) * float((at % 8 < 4 ? pair & 15 : pair >> 4) - 8);
}

// Adds up 4 products for each output; the inputs are the 4 bytes of `x`. `excess` is counted in from the start or at the
// end.
#if defined(TERCET_VNNI)
typedef I32 Total;
inline Total begin(int32_t excess) { return I32{} + excess; }
inline Total add(Total total, U32 weights, int32_t x) { return add_products(total, weights, broadcast(uint32_t(x))); }
inline I32 whole(Total total, int32_t) { return total; }
#elif defined(__AVX2__)
typedef S16 Total;  // of a whole block: 8 times 2 * 15 * 127 at most
inline Total begin(int32_t) { return Total{}; }
inline Total add(Total total, U32 weights, int32_t x) {
    return total + (S16)_mm256_maddubs_epi16((__m256i)weights, _mm256_set1_epi32(x));
}
inline I32 whole(Total total, int32_t excess) {
    return (I32)_mm256_madd_epi16((__m256i)total, _mm256_set1_epi16(1)) + excess;
}
#else
typedef I32 Total;
inline Total begin(int32_t excess) { return I32{} + excess; }
inline Total add(Total total, U32 weights, int32_t x) {
    for (int i = 0; i < 4; i++) total += bit_cast<I32>(weights >> (8 * i) & 0xFF) * int32_t(int8_t(x >> (8 * i)));
    return total;
}
inline I32 whole(Total total, int32_t) { return total; }
#endif

// Adds the products of a block to the sums of a row, in the same order for every number of rows.
inline F32 add_block(F32 sums, I32 total, F32 scale) { return __builtin_convertvector(total, F32) * scale + sums; }

// ROWS rows of inputs times WIDTH panels, which are read side by side: memory is faster at several streams than at one.
template <int ROWS, int WIDTH>
inline void block(const char* x, int64_t stride, const char* panels, int64_t bytes, F32* out, int64_t out_stride) {
    constexpr int VECTORS = WIDTH * PARTS, BESIDE = TOGETHER < VECTORS ? TOGETHER : VECTORS;
    int64_t count = bytes / BLOCK_BYTES;
    F32 sums[ROWS][VECTORS] = {};
    for (int64_t at = 0; at < count; at++) {
        int64_t soon = at + AHEAD / WIDTH < count ? AHEAD / WIDTH : AHEAD / WIDTH + (WIDTH - 1) * count;
        UNROLLED for (int panel = 0; panel < WIDTH; panel++)
            UNROLLED for (int line = 0; line < 4; line++)
                __builtin_prefetch(panels + panel * bytes + (at + soon) * BLOCK_BYTES + line * ROW_BYTES);
        auto excess = [&](int row) { return word(x + row * stride + count * BLOCK + at * 4); };
        UNROLLED for (int first = 0; first < VECTORS; first += BESIDE) {
            auto own = [&](int i) { return panels + (first + i) / PARTS * bytes + at * BLOCK_BYTES; };
            Total totals[ROWS][BESIDE];
            UNROLLED for (int row = 0; row < ROWS; row++)
                UNROLLED for (int i = 0; i < BESIDE; i++) totals[row][i] = begin(excess(row));
            UNROLLED for (int pair = 0; pair < 4; pair++) {
                U32 lower[BESIDE], upper[BESIDE];
                UNROLLED for (int i = 0; i < BESIDE; i++) {
                    int64_t byte = 2 * PANEL + pair * ROW_BYTES + (first + i) % PARTS * 4 * LANES;
                    U32 weights = vector<U32>(own(i) + byte);
                    lower[i] = weights & 0x0F0F0F0Fu, upper[i] = weights >> 4 & 0x0F0F0F0Fu;
                }
                UNROLLED for (int row = 0; row < ROWS; row++) {
                    const char* inputs = x + row * stride + at * BLOCK + pair * 8;
                    int32_t even = word(inputs), odd = word(inputs + 4);
                    UNROLLED for (int i = 0; i < BESIDE; i++)
                        totals[row][i] = settled(add(settled(add(totals[row][i], lower[i], even)), upper[i], odd));
                }
            }
            UNROLLED for (int i = 0; i < BESIDE; i++) {
                F32 scale = load(reinterpret_cast<const Bf16*>(own(i)) + (first + i) % PARTS * LANES);
                UNROLLED for (int row = 0; row < ROWS; row++) {
                    F32& sum = sums[row][first + i];
                    sum = add_block(sum, whole(totals[row][i], excess(row)), scale);
                }
            }
        }
    }
    for (int row = 0; row < ROWS; row++)
        for (int i = 0; i < VECTORS; i++) out[row * out_stride + i] = sums[row][i];
}

// `rows` rows, at most TALL at a time.
template <int TALL, int WIDTH>
inline void multiply_rows(const char* x, int64_t stride, int rows, const char* panels, int64_t bytes, F32* out,
                          int64_t out_stride) {
    for_row_groups<TALL>(rows, [=](auto height, int first) {
        block<height, WIDTH>(x + first * stride, stride, panels, bytes, out + first * out_stride, out_stride);
    });
}

// out [rows][width * PARTS] = x [rows] @ panels [width].
inline void multiply(const char* x, int64_t stride, int rows, const char* panels, int64_t bytes, int width, F32* out,
                     int64_t out_stride) {
    if (rows == 1 && width == 4) return block<1, 4>(x, stride, panels, bytes, out, out_stride);
    constexpr int BESIDE = PARTS == 1 ? TOGETHER : 1;
    for (; width >= BESIDE; width -= BESIDE, panels += BESIDE * bytes, out += BESIDE * PARTS)
        multiply_rows<MANY_ROWS, BESIDE>(x, stride, rows, panels, bytes, out, out_stride);
    if (width) multiply_rows<MANY_ROWS, 1>(x, stride, rows, panels, bytes, out, out_stride);
}

}  // namespace int4

// What loops over all formats need to know of it.
struct Nibbles {
    using Element = uint8_t;
    using Input = int8_t;
    using Sums = F32;
    static constexpr int GROUP = 8;
};

template <>
inline int64_t panel_bytes<Nibbles>(int64_t k) {
    return int4::panel_bytes(k);
}
