// Products on AMX tiles: 16 rows of inputs by 16 outputs by 64 bytes of k at a time. Elsewhere `usable` is false.
#pragma once

#include "format.h"

#if defined(__AMX_BF16__) && defined(__AMX_INT8__)
#define TERCET_AMX 1
#endif

namespace amx {

constexpr int FEWEST_ROWS = 5;  // with fewer rows dot products are faster; measured

#if TERCET_AMX

// A build with tiles is loaded only where `best_level` has asked the operating system for them.
inline constexpr bool usable() { return true; }

// Tiles are given back at the end of a task, so that other work does not save and restore them.
struct Session {
    ~Session() { _tile_release(); }
};

// Tiles 0 to 3 are sums (two blocks of rows by two panels), 4 and 5 inputs, 6 and 7 weights.
inline void configure(int rows) {
    struct alignas(64) {
        uint8_t palette = 1, start = 0, reserved[14] = {};
        uint16_t bytes[16] = {};
        uint8_t rows[16] = {};
    } config;
    uint8_t upper = uint8_t(rows < 16 ? rows : 16), lower = uint8_t(rows < 16 ? 16 : rows - 16);
    if (lower == 0) lower = 16;
    for (int tile = 0; tile < 8; tile++) config.bytes[tile] = 64;
    config.rows[0] = config.rows[1] = config.rows[4] = upper;
    config.rows[2] = config.rows[3] = config.rows[5] = lower;
    config.rows[6] = config.rows[7] = 16;
    _tile_loadconfig(&config);
}

inline void prefetch(const char* tile) {
    for (int row = 0; row < TILE_ROWS; row++) __builtin_prefetch(tile + row * ROW_BYTES);
}

#define TERCET_DOT(sums, x, weights)                         \
    if constexpr (Format::GROUP == 2)                        \
        _tile_dpbf16ps(sums, x, weights);                    \
    else                                                     \
        _tile_dpbusd(sums, x, weights)

// `rows` <= 32 inputs by `width` <= 2 panels: sums [rows][2 * PARTS].
template <class Format>
inline void multiply(const char* x, int64_t stride, int rows, const char* panels, int64_t panel_bytes, int width,
                     typename Format::Sums* sums) {
    constexpr int64_t TILE = TILE_ROWS * ROW_BYTES, AHEAD = 4 * TILE, OUT = 2 * ROW_BYTES;
    char* out = reinterpret_cast<char*>(sums);
    const char* second = panels + (width == 2 ? panel_bytes : 0);
    configure(rows);
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    if (rows > 16) {
        for (int64_t at = 0; at < panel_bytes; at += TILE, x += ROW_BYTES) {
            _tile_loadd(4, x, stride);
            _tile_loadd(5, x + 16 * stride, stride);
            _tile_loadd(6, panels + at, ROW_BYTES);
            _tile_loadd(7, second + at, ROW_BYTES);
            TERCET_DOT(0, 4, 6);
            TERCET_DOT(1, 4, 7);
            TERCET_DOT(2, 5, 6);
            TERCET_DOT(3, 5, 7);
        }
        _tile_stored(2, out + 16 * OUT, OUT);
        _tile_stored(3, out + 16 * OUT + ROW_BYTES, OUT);
    } else {
        for (int64_t at = 0; at < panel_bytes; at += TILE, x += ROW_BYTES) {
            prefetch(panels + at + AHEAD);
            prefetch(second + at + AHEAD);
            _tile_loadd(4, x, stride);
            _tile_loadd(6, panels + at, ROW_BYTES);
            _tile_loadd(7, second + at, ROW_BYTES);
            TERCET_DOT(0, 4, 6);
            TERCET_DOT(1, 4, 7);
        }
    }
    _tile_stored(0, out, OUT);
    _tile_stored(1, out + ROW_BYTES, OUT);
}

#undef TERCET_DOT

#else

inline constexpr bool usable() { return false; }

struct Session {
    ~Session() {}
};

template <class Format>
inline void multiply(const char*, int64_t, int, const char*, int64_t, int, typename Format::Sums*) {}

#endif

}  // namespace amx
