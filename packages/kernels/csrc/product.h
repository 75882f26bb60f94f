// Products of a few rows with a few panels (see format.h): what linear layers and attention are both made of.
#pragma once

#include "amx.h"
#include "format.h"

namespace product {

constexpr int64_t AHEAD = 1024;                   // bytes of a panel to prefetch ahead
constexpr int REGISTERS = LANES == 16 ? 24 : 12;  // vectors of sums that stay in registers

// The most rows at a time with so many panels.
constexpr int tallest(int width) {
    int rows = REGISTERS / (width * PARTS);
    return rows < 1 ? 1 : rows > 8 ? 8 : rows;
}

// ROWS rows by WIDTH panels in registers. The order of additions is that of k, whatever the block, so that a row's
// result does not depend on the rows beside it.
template <class Format, int ROWS, int WIDTH>
inline void block(const char* x, int64_t stride, const char* panels, int64_t panel_bytes, typename Format::Sums* out,
                  int64_t out_stride) {
    using Input = typename Format::Input;
    typename Format::Sums sums[ROWS][WIDTH * PARTS] = {};
    for (int64_t at = 0, group = 0; at < panel_bytes; at += ROW_BYTES, group++) {
        for (int panel = 0; panel < WIDTH; panel++) {
            const char* weights = panels + panel * panel_bytes + at;
            __builtin_prefetch(weights + AHEAD);
            for (int part = 0; part < PARTS; part++)
                for (int row = 0; row < ROWS; row++) {
                    auto& sum = sums[row][panel * PARTS + part];
                    const auto* inputs = reinterpret_cast<const Input*>(x + row * stride) + group * Format::GROUP;
                    sum = Format::dot(sum, inputs, weights + part * 4 * LANES);
                }
        }
    }
    for (int row = 0; row < ROWS; row++)
        for (int i = 0; i < WIDTH * PARTS; i++) out[row * out_stride + i] = sums[row][i];
}

template <class Format, int ROWS, int WIDTH>
inline void blocks(const char* x, int64_t stride, int rows, const char* panels, int64_t panel_bytes,
                   typename Format::Sums* out, int64_t out_stride) {
    for (; rows >= ROWS; rows -= ROWS, x += ROWS * stride, out += ROWS * out_stride)
        block<Format, ROWS, WIDTH>(x, stride, panels, panel_bytes, out, out_stride);
    if constexpr (ROWS > 1)
        if (rows) blocks<Format, ROWS - 1, WIDTH>(x, stride, rows, panels, panel_bytes, out, out_stride);
}

// out [rows][width * PARTS] = x [rows] @ panels [width], for up to 32 rows and 4 panels; rows of x are `stride` bytes
// apart and rows of out `out_stride` vectors. `on_tiles` asks for the tile unit, where there is one.
template <class Format>
inline void multiply(amx::Tiles& tiles, bool on_tiles, const char* x, int64_t stride, int rows, const char* panels,
                     int64_t panel_bytes, int width, typename Format::Sums* out, int64_t out_stride) {
    if (amx::HERE && Format::GROUP > 1 && on_tiles) {
        for (; width > 0; width -= 2, panels += 2 * panel_bytes, out += 2 * PARTS)
            amx::multiply<Format>(tiles, x, stride, rows, panels, panel_bytes, width < 2 ? 1 : 2,
                                  reinterpret_cast<char*>(out), out_stride * 4 * LANES);
        return;
    }
    if (width == 4) return blocks<Format, tallest(4), 4>(x, stride, rows, panels, panel_bytes, out, out_stride);
    if (width >= 2) {
        blocks<Format, tallest(2), 2>(x, stride, rows, panels, panel_bytes, out, out_stride);
        panels += 2 * panel_bytes;
        out += 2 * PARTS;
        width -= 2;
    }
    if (width) blocks<Format, tallest(1), 1>(x, stride, rows, panels, panel_bytes, out, out_stride);
}

}  // namespace product
