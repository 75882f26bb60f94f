// The instructions of AVX-512 BF16 and of AMX, in those of AVX-512. A library that is compiled for AVX-512 with this file
// before all others runs the kernels of those two levels where the processor has neither. Only the test suite does.
//
// The arithmetic is that of Intel's manual, less that subnormal numbers are kept. What the processor answers with a fault
// ends the process.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace emulated {

inline void need(bool holds, const char* what) {
    if (holds) return;
    std::fprintf(stderr, "emulated AMX: %s\n", what);
    std::abort();
}

// Of pairs of bfloat16, the one in the upper or in the lower half of each 4 bytes.
typedef uint32_t Words __attribute__((vector_size(64)));
inline __m512 upper(__m512i pairs) { return (__m512)((Words)pairs & 0xFFFF0000u); }
inline __m512 lower(__m512i pairs) { return (__m512)((Words)pairs << 16); }

inline __m512 dot_pairs(__m512 sums, __m512i a, __m512i b) {
    return _mm512_fmadd_ps(lower(a), lower(b), _mm512_fmadd_ps(upper(a), upper(b), sums));
}

// To nearest, ties to even; a NaN stays one.
inline __m256i rounded(__m512 x) {
    Words bits = (Words)x, up = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
    __m512i halves = (__m512i)(x == x ? up : bits >> 16 | 0x40);
    return _mm512_cvtepi32_epi16(halves);
}

// What `_tile_loadconfig` reads.
struct Config {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
};
static_assert(sizeof(Config) == 64, "as the manual lays it out");

// The tile registers of a thread.
class Tiles {
  public:
    void configure(const void* memory) {
        std::memcpy(&config_, memory, sizeof config_);
        need(config_.palette == 1 && config_.start_row == 0, "palette 1 from row 0 on");
        for (uint8_t byte : config_.reserved) need(byte == 0, "reserved bytes are zero");
        for (int tile = 0; tile < 16; tile++) {
            bool used = config_.rows[tile] || config_.row_bytes[tile];
            need(!used || tile < 8, "there are 8 tiles");
            need(config_.rows[tile] <= 16 && config_.row_bytes[tile] <= 64, "a tile has 16 rows of 64 bytes at most");
        }
        std::memset(values_, 0, sizeof values_);
    }

    void release() { config_ = {}; }

    void zero(int tile) {
        exists(tile);
        std::memset(values_[tile], 0, sizeof values_[tile]);
    }

    void load(int tile, const void* from, int64_t stride) {
        zero(tile);
        for (int row = 0; row < config_.rows[tile]; row++)
            std::memcpy(values_[tile][row], static_cast<const char*>(from) + row * stride, config_.row_bytes[tile]);
    }

    void store(int tile, void* to, int64_t stride) const {
        exists(tile);
        for (int row = 0; row < config_.rows[tile]; row++)
            std::memcpy(static_cast<char*>(to) + row * stride, values_[tile][row], config_.row_bytes[tile]);
    }

    // Adds a @ b, where a row of a has 4 bytes for each row of b. Products of the two halves are added up apart.
    void dot_pairs(int sums, int a, int b) {
        shapes_fit(sums, a, b);
        for (int row = 0; row < config_.rows[sums]; row++) {
            __m512 odd = _mm512_setzero_ps(), even = odd;
            for (int k = 0; k < config_.rows[b]; k++) {
                __m512i x = word(a, row, k), weights = line(b, k);
                odd = _mm512_fmadd_ps(upper(x), upper(weights), odd);
                even = _mm512_fmadd_ps(lower(x), lower(weights), even);
            }
            set_line(sums, row, (__m512i)_mm512_add_ps((__m512)line(sums, row), _mm512_add_ps(even, odd)));
        }
    }

    // The same of bytes, those of a without a sign and those of b with one.
    void dot_bytes(int sums, int a, int b) {
        shapes_fit(sums, a, b);
        for (int row = 0; row < config_.rows[sums]; row++) {
            __m512i total = line(sums, row);
            for (int k = 0; k < config_.rows[b]; k++) total = _mm512_dpbusd_epi32(total, word(a, row, k), line(b, k));
            set_line(sums, row, total);
        }
    }

    // The same of bytes with signs.
    void dot_signed_bytes(int sums, int a, int b) {
        shapes_fit(sums, a, b);
        const __m512i excess = _mm512_set1_epi8(char(128));
        for (int row = 0; row < config_.rows[sums]; row++) {
            __m512i total = line(sums, row);
            for (int k = 0; k < config_.rows[b]; k++) {
                __m512i weights = line(b, k);
                total = _mm512_dpbusd_epi32(total, _mm512_xor_si512(word(a, row, k), excess), weights);
                total = _mm512_sub_epi32(total, _mm512_dpbusd_epi32(_mm512_setzero_si512(), excess, weights));
            }
            set_line(sums, row, total);
        }
    }

  private:
    void exists(int tile) const {
        need(config_.palette == 1, "tiles are used before they are configured");
        need(config_.rows[tile] && config_.row_bytes[tile], "a tile that is not configured is used");
    }

    void shapes_fit(int sums, int a, int b) const {
        exists(sums);
        exists(a);
        exists(b);
        need(sums != a && sums != b && a != b, "a product takes three tiles");
        need(config_.rows[sums] == config_.rows[a], "sums have as many rows as inputs");
        need(config_.row_bytes[sums] == config_.row_bytes[b], "sums have as many columns as weights");
        need(config_.row_bytes[a] == 4 * config_.rows[b], "inputs are as long as weights have rows");
    }

    __m512i word(int tile, int row, int k) const {
        int32_t x;
        std::memcpy(&x, values_[tile][row] + 4 * k, sizeof x);
        return _mm512_set1_epi32(x);
    }

    __m512i line(int tile, int row) const { return _mm512_loadu_si512(values_[tile][row]); }

    // Past the end of a row a tile stays zero.
    void set_line(int tile, int row, __m512i x) {
        _mm512_mask_storeu_epi32(values_[tile][row], __mmask16((1u << config_.row_bytes[tile] / 4) - 1), x);
    }

    Config config_ = {};
    char values_[8][16][64];
};

inline Tiles& tiles() {
    static thread_local Tiles mine;
    return mine;
}

}  // namespace emulated

#define __AVX512BF16__ 1
#define _mm512_cvtneps_pbh(x) emulated::rounded(x)
#define _mm512_dpbf16_ps(sums, a, b) emulated::dot_pairs(sums, (__m512i)(a), (__m512i)(b))

#if defined(EMULATE_AMX)
#define __AMX_TILE__ 1
#define __AMX_BF16__ 1
#define __AMX_INT8__ 1
#undef _tile_loadd
#undef _tile_stored
#undef _tile_zero
#undef _tile_dpbf16ps
#undef _tile_dpbusd
#undef _tile_dpbssd
#define _tile_loadconfig(memory) emulated::tiles().configure(memory)
#define _tile_release() emulated::tiles().release()
#define _tile_zero(tile) emulated::tiles().zero(tile)
#define _tile_loadd(tile, from, stride) emulated::tiles().load(tile, from, stride)
#define _tile_stored(tile, to, stride) emulated::tiles().store(tile, to, stride)
#define _tile_dpbf16ps(sums, a, b) emulated::tiles().dot_pairs(sums, a, b)
#define _tile_dpbusd(sums, a, b) emulated::tiles().dot_bytes(sums, a, b)
#define _tile_dpbssd(sums, a, b) emulated::tiles().dot_signed_bytes(sums, a, b)
#endif
