// Products on AMX tiles: 16 rows of inputs by 16 outputs by 64 bytes of k at a time. Other builds never call them.
#pragma once

#include "format.h"

namespace amx {

#if defined(__AMX_BF16__) && defined(__AMX_INT8__)

// A build with tiles is loaded only where `levels` has asked the operating system for them.
constexpr bool HERE = true;

// What a thread's tiles are set up for. They are given back at the end of a task, so that other work does not save and
// restore their 8 KiB.
class Tiles {
  public:
    ~Tiles() {
        if (rows_) _tile_release();
    }

    // Tiles 0 to 3 are sums (two blocks of rows by two panels), 4 and 5 inputs, 6 and 7 weights.
    void configure(int rows) {
        if (rows == rows_) return;
        rows_ = rows;
        Config config;
        uint8_t upper = uint8_t(rows < 16 ? rows : 16), lower = uint8_t(rows <= 16 ? 16 : rows - 16);
        for (int tile = 0; tile < 8; tile++) config.bytes[tile] = 64;
        config.rows[0] = config.rows[1] = config.rows[4] = upper;
        config.rows[2] = config.rows[3] = config.rows[5] = lower;
        config.rows[6] = config.rows[7] = 16;
        config.load();
    }

    // For blocks of weights: tile 0 is sums, 1 inputs, 2 weights.
    void configure_block(int rows, int inputs) {
        if (rows_ == -rows) return;
        rows_ = -rows;
        Config config;
        config.rows[0] = config.rows[1] = uint8_t(rows);
        config.rows[2] = uint8_t(inputs / 4);
        config.bytes[0] = config.bytes[2] = ROW_BYTES;
        config.bytes[1] = uint16_t(inputs);
        config.load();
    }

  private:
    int rows_ = 0;  // negative for blocks, which in a task are of one size

    struct alignas(64) Config {
        uint8_t palette = 1, start = 0, reserved[14] = {};
        uint16_t bytes[16] = {};
        uint8_t rows[16] = {};

        void load() const {
            asm volatile("" : : "r"(this) : "memory");  // GCC 12 believes that 8 bytes are read, and may drop the rest
            _tile_loadconfig(this);
        }
    };
};

// Puts earlier stores before the loads of tiles that follow: GCC 12 believes that those read no memory.
inline void compiler_barrier() { asm volatile("" : : : "memory"); }

inline void prefetch(const char* tile) {
    for (int row = 0; row < TILE_ROWS; row++) __builtin_prefetch(tile + row * ROW_BYTES);
}

#define TERCET_DOT(sums, x, weights)      \
    if constexpr (Format::GROUP == 2)     \
        _tile_dpbf16ps(sums, x, weights); \
    else                                  \
        _tile_dpbusd(sums, x, weights)

// `rows` <= 32 inputs by `width` <= 2 panels; rows of sums are `out_bytes` apart.
template <class Format>
inline void multiply(Tiles& tiles, const char* x, int64_t stride, int rows, const char* panels, int64_t panel_bytes,
                     int width, char* out, int64_t out_bytes) {
    constexpr int64_t TILE = TILE_ROWS * ROW_BYTES, AHEAD = 4 * TILE;
    const char* second = panels + (width == 2 ? panel_bytes : 0);
    tiles.configure(rows);
    compiler_barrier();
    _tile_zero(0);
    _tile_zero(1);
    if (rows > 16) {
        _tile_zero(2);
        _tile_zero(3);
        for (int64_t at = 0; at < panel_bytes; at += TILE, x += ROW_BYTES) {
            prefetch(panels + at + AHEAD);
            prefetch(second + at + AHEAD);
            _tile_loadd(4, x, stride);
            _tile_loadd(6, panels + at, ROW_BYTES);
            TERCET_DOT(0, 4, 6);
            _tile_loadd(7, second + at, ROW_BYTES);
            TERCET_DOT(1, 4, 7);
            _tile_loadd(5, x + 16 * stride, stride);
            TERCET_DOT(2, 5, 6);
            TERCET_DOT(3, 5, 7);
        }
        _tile_stored(2, out + 16 * out_bytes, out_bytes);
        if (width == 2) _tile_stored(3, out + 16 * out_bytes + ROW_BYTES, out_bytes);
    } else {
        for (int64_t at = 0; at < panel_bytes; at += TILE, x += ROW_BYTES) {
            prefetch(panels + at + AHEAD);
            prefetch(second + at + AHEAD);
            _tile_loadd(4, x, stride);
            _tile_loadd(6, panels + at, ROW_BYTES);
            TERCET_DOT(0, 4, 6);
            _tile_loadd(7, second + at, ROW_BYTES);
            TERCET_DOT(1, 4, 7);
        }
    }
    _tile_stored(0, out, out_bytes);
    if (width == 2) _tile_stored(1, out + ROW_BYTES, out_bytes);
}

#undef TERCET_DOT

// One row of bfloat16 inputs by WIDTH panels, faster than on tiles. Additions have the order of a tile: the two halves of
// pairs apart over its 16 rows of weights, then their sum. So a row has the same bits alone and beside others.
template <int WIDTH>
inline void multiply_row(const char* x, const char* panels, int64_t panel_bytes, F32* out) {
    constexpr int64_t TILE = TILE_ROWS * ROW_BYTES, AHEAD = 1024;
    __m512 sums[WIDTH] = {};
    for (int64_t at = 0; at < panel_bytes; at += TILE) {
        __m512 lower[WIDTH] = {}, upper[WIDTH] = {};
        // The first of the panels that follow come after the last bytes of these.
        int64_t next = at + AHEAD < panel_bytes ? at + AHEAD : at + AHEAD + (WIDTH - 1) * panel_bytes;
        UNROLLED for (int line = 0; line < TILE_ROWS; line++, x += 4) {
            U32 pair = U32{} + uint32_t(word(x));
            __m512 first = bit_cast<__m512>(pair << 16), second = bit_cast<__m512>(pair & 0xFFFF0000u);
            UNROLLED for (int i = 0; i < WIDTH; i++) {
                const char* from = panels + i * panel_bytes + line * ROW_BYTES;
                __builtin_prefetch(from + next);
                U32 weights = vector<U32>(from + at);
                lower[i] = _mm512_fmadd_ps(first, bit_cast<__m512>(weights << 16), lower[i]);
                upper[i] = _mm512_fmadd_ps(second, bit_cast<__m512>(weights & 0xFFFF0000u), upper[i]);
            }
        }
        UNROLLED for (int i = 0; i < WIDTH; i++)
            sums[i] = _mm512_add_ps(sums[i], _mm512_add_ps(lower[i], upper[i]));
    }
    UNROLLED for (int i = 0; i < WIDTH; i++) out[i] = bit_cast<F32>(sums[i]);
}

#else

constexpr bool HERE = false;

struct Tiles {
    void configure(int) {}
};

template <class Format>
inline void multiply(Tiles&, const char*, int64_t, int, const char*, int64_t, int, char*, int64_t) {}

template <int WIDTH>
inline void multiply_row(const char*, const char*, int64_t, F32*) {}

#endif

}  // namespace amx
