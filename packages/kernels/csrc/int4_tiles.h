// Products of INT4 weights with many rows of inputs on AMX tiles.
//
// A panel becomes one of INT8 once for all rows: codes are rounded again, to steps of one scale for each output, as
// `widen_int4` of ops/linear.py defines it. That adds little to what rounding to 4 bits took away, and products of 64
// inputs need no scales in between.
#pragma once

#include "amx.h"
#include "buffer.h"
#include "int4.h"
#include "rounding.h"

namespace int4 {

constexpr int64_t WIDENED_ROWS = amx::HERE ? 17 : INT64_MAX;  // of inputs, from which on panels are widened; measured

#if defined(__AMX_BF16__) && defined(__AMX_INT8__)

// The step of each output: a code of 0 in the block with the largest scale becomes 127 or -127. NaN where a scale is.
inline F32 widened_steps(const char* panel, int64_t k) {
    F32 most = {}, poison = {};
    for (int64_t block = 0; block < blocks(k); block++) {
        F32 scale = load(reinterpret_cast<const Bf16*>(panel + block * BLOCK_BYTES));
        most = max(max(scale, -scale), most);
        poison = scale * 0.0f + poison;
    }
    return most * 8.0f / 127.0f + poison;
}

// Codes in bits 4 to 7 of each 16 bits, less 8, times factors in units of 2^-11: whole numbers of 8 bits.
inline __m512i times(U32 codes, __m512i factors) {
    __m512i centered = _mm512_sub_epi16((__m512i)(codes & 0x00F000F0u), _mm512_set1_epi16(128));
    return _mm512_mulhrs_epi16(centered, factors);
}

inline void store_pairs(char* to, __m512i even, __m512i odd) {
    _mm512_storeu_si512(to, (__m512i)(((U32)even & 0x00FF00FFu) | (U32)_mm512_slli_epi16(odd, 8)));
}

// Writes a panel of int8 with the given steps.
inline void widen(const char* panel, int64_t k, F32 steps, char* wide) {
    steps = steps > F32{} ? steps : broadcast(1.0f);
    for (int64_t block = 0; block < blocks(k); block++, panel += BLOCK_BYTES) {
        F32 scale = load(reinterpret_cast<const Bf16*>(panel));
        U32 factor = (U32)nearest(scale / steps * 2048.0f);
        __m512i factors = (__m512i)(factor << 16 | (factor & 0xFFFFu));
        for (int64_t row = 0; row < 4; row++, wide += 2 * ROW_BYTES) {
            U32 pairs = vector<U32>(panel + 2 * PANEL + row * ROW_BYTES);
            store_pairs(wide, times(pairs << 4, factors), times(pairs >> 4, factors));
            store_pairs(wide + ROW_BYTES, times(pairs, factors), times(pairs >> 8, factors));
        }
    }
    if (blocks(k) % 2) std::memset(wide, 0, size_t(BLOCK * PANEL));  // the rest of a tile
}

#else

inline F32 widened_steps(const char*, int64_t) { return F32{}; }
inline void widen(const char*, int64_t, F32, char*) {}

#endif

// Two panels, widened, and the products with them.
class WidenedPanels {
  public:
    explicit WidenedPanels(int64_t k) : k_(k), bytes_(::panel_bytes<Bytes>(blocks(k) * BLOCK)) {}

    void take(const char* panels, int width) {
        static thread_local Buffer memory;
        wide_ = memory.bytes(2 * bytes_);
        for (int i = 0; i < width; i++) {
            const char* panel = panels + i * panel_bytes(k_);
            steps_[i] = widened_steps(panel, k_);
            widen(panel, k_, steps_[i], wide_ + i * bytes_);
        }
    }

    // out [rows][width] = x [rows <= 32] @ the panels.
    void multiply(amx::Tiles& tiles, const char* x, int64_t stride, int rows, int width, F32* out, int64_t out_stride) {
        I32 sums[32][2];
        amx::multiply<SignedBytes>(tiles, x, stride, rows, wide_, bytes_, width, reinterpret_cast<char*>(sums),
                                   sizeof sums[0]);
        for (int row = 0; row < rows; row++)
            for (int i = 0; i < width; i++)
                out[row * out_stride + i] = __builtin_convertvector(sums[row][i], F32) * steps_[i];
    }

  private:
    int64_t k_, bytes_;
    char* wide_ = nullptr;
    F32 steps_[2] = {};
};

}  // namespace int4
