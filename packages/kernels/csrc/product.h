// Products of a few rows with a few panels (see format.h): what linear layers and attention are both made of.
#pragma once

#include "amx.h"
#include "format.h"
#include "row_groups.h"

namespace product {

constexpr int64_t AHEAD = 1024;  // bytes to prefetch ahead; at the end of some panels, of those that follow
constexpr int REGISTERS = LANES == 16 ? 24 : 12;  // vectors of sums that stay in registers

// The most rows at a time with so many panels.
constexpr int tallest(int width) {
    int rows = REGISTERS / (width * PARTS);
    return rows < 1 ? 1 : rows > 8 ? 8 : rows;
}

// Which of `rows` rows that meet the same panels, some after others, comes first; of none where nothing is known.
struct Turn {
    int64_t row = 0, rows = 0;

    Turn after(int64_t count) const { return {row + count, rows}; }
};

// What a block calls for: bytes from where its panels begin, and how much further each time.
struct Ahead {
    int64_t at, pace;
};

// The first rows that meet panels call for what they themselves read next. Those after them find it in a cache, and
// call for the panels that follow, each for its share: else memory would wait while they are multiplied.
template <int ROWS>
inline Ahead ahead(Turn turn, int64_t panel_bytes) {
    int64_t others = turn.rows - ROWS;
    if (turn.row == 0 || others <= 0) return {AHEAD, ROW_BYTES};
    return {panel_bytes + (turn.row - ROWS) * panel_bytes / others, (ROWS * ROW_BYTES + others - 1) / others};
}

// ROWS rows by WIDTH panels in registers. The order of additions is that of k, whatever the block, so that a row's
// result does not depend on the rows beside it. Where there are tiles, bfloat16 has their order instead.
template <class Format, int ROWS, int WIDTH>
inline void block(const char* x, int64_t stride, const char* panels, int64_t panel_bytes, Turn turn,
                  typename Format::Sums* out, int64_t out_stride) {
    using Input = typename Format::Input;
    constexpr int VECTORS = WIDTH * PARTS;
    typename Format::Sums sums[ROWS][VECTORS] = {};
    Ahead soon = ahead<ROWS>(turn, panel_bytes);
    for (int64_t at = 0, group = 0; at < panel_bytes; at += ROW_BYTES, group++, soon.at += soon.pace) {
        int64_t next = soon.at < panel_bytes ? soon.at : soon.at + (WIDTH - 1) * panel_bytes;
        UNROLLED for (int panel = 0; panel < WIDTH; panel++)
            __builtin_prefetch(panels + panel * panel_bytes + next);
        UNROLLED for (int step = 0; step < Format::STEPS; step++) {
            typename Format::Weights weights[VECTORS];
            UNROLLED for (int i = 0; i < VECTORS; i++)
                weights[i] = Format::read(panels + i / PARTS * panel_bytes + at + i % PARTS * 4 * LANES, step);
            UNROLLED for (int row = 0; row < ROWS; row++) {
                const auto* inputs = reinterpret_cast<const Input*>(x + row * stride) + group * Format::GROUP;
                UNROLLED for (int i = 0; i < VECTORS; i++)
                    sums[row][i] = settled(Format::dot(sums[row][i], inputs, weights[i], step));
            }
        }
    }
    for (int row = 0; row < ROWS; row++)
        for (int i = 0; i < VECTORS; i++) out[row * out_stride + i] = sums[row][i];
}

// `rows` rows, at most TALL at a time.
template <class Format, int TALL, int WIDTH>
inline void blocks(const char* x, int64_t stride, int rows, const char* panels, int64_t panel_bytes, Turn turn,
                   typename Format::Sums* out, int64_t out_stride) {
    for_row_groups<TALL>(rows, [=](auto height, int first) {
        block<Format, height, WIDTH>(x + first * stride, stride, panels, panel_bytes, turn.after(first),
                                     out + first * out_stride, out_stride);
    });
}

// One row of bfloat16 inputs by up to 4 panels, with the bits of the tile unit.
inline void row_in_tile_order(const char* x, const char* panels, int64_t panel_bytes, int width, F32* out) {
    for (; width >= 4; width -= 4, panels += 4 * panel_bytes, out += 4)
        amx::multiply_row<4>(x, panels, panel_bytes, out);
    for (; width >= 2; width -= 2, panels += 2 * panel_bytes, out += 2)
        amx::multiply_row<2>(x, panels, panel_bytes, out);
    if (width == 1) amx::multiply_row<1>(x, panels, panel_bytes, out);
}

// out [rows][width * PARTS] = x [rows] @ panels [width], for up to 32 rows and 4 panels; rows of x are `stride` bytes
// apart and rows of out `out_stride` vectors. `on_tiles` asks for the tile unit, where there is one. `turn` is that of
// the first row.
template <class Format>
inline void multiply(amx::Tiles& tiles, bool on_tiles, const char* x, int64_t stride, int rows, const char* panels,
                     int64_t panel_bytes, int width, typename Format::Sums* out, int64_t out_stride, Turn turn = {}) {
    if (amx::HERE && Format::GROUP > 1 && on_tiles) {
        for (; width > 0; width -= 2, panels += 2 * panel_bytes, out += 2 * PARTS)
            amx::multiply<Format>(tiles, x, stride, rows, panels, panel_bytes, width < 2 ? 1 : 2,
                                  reinterpret_cast<char*>(out), out_stride * 4 * LANES);
        return;
    }
    if constexpr (amx::HERE && Format::GROUP == 2) {
        for (; rows > 0; rows--, x += stride, out += out_stride)
            row_in_tile_order(x, panels, panel_bytes, width, out);
        return;
    }
    if (width == 4 && rows < tallest(2))
        return blocks<Format, tallest(4), 4>(x, stride, rows, panels, panel_bytes, turn, out, out_stride);
    if (LANES == 16 || rows <= tallest(2))
        for (; width >= 2; width -= 2, panels += 2 * panel_bytes, out += 2 * PARTS)
            blocks<Format, tallest(2), 2>(x, stride, rows, panels, panel_bytes, turn, out, out_stride);
    for (; width > 0; width--, panels += panel_bytes, out += PARTS)
        blocks<Format, tallest(1), 1>(x, stride, rows, panels, panel_bytes, turn, out, out_stride);
}

}  // namespace product
