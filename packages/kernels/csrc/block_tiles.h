// Products of weights in blocks on AMX tiles. Tiles give the sums of a block in int32, which are exact; these are scaled
// and added in float32 block by block, in the order of the dot products of few rows. So both give the same bits.
#pragma once

#include <algorithm>
#include <type_traits>

#include "amx.h"
#include "blocks.h"
#include "buffer.h"
#include "int4.h"

namespace block_tiles {

// Rows of inputs that are multiplied at a time. Fewer are no faster than dot products; measured.
constexpr int TILED_ROWS = 16;

#if defined(__AMX_BF16__) && defined(__AMX_INT8__)

constexpr int64_t STAGE = 512;     // inputs whose codes and rows of inputs stay in the first-level cache
constexpr int64_t PREFETCH = 4096;  // bytes of a panel to prefetch ahead

// Exact sums of a block: int32 [rows][PANEL].
struct alignas(ROW_BYTES) Totals {
    I32 rows[TILED_ROWS];
};

// Widens codes of 4 bits, less `zero`, to the rows of a tile. Both kinds of blocks arrange them alike.
template <int BLOCK>
inline void widen(const char* codes, int zero, char* wide) {
    typedef int8_t S8 __attribute__((vector_size(ROW_BYTES)));
    UNROLLED for (int row = 0; row < BLOCK / 8; row++) {
        U32 words = vector<U32>(codes + row * ROW_BYTES);
        U32 halves[2] = {words & 0x0F0F0F0Fu, words >> 4 & 0x0F0F0F0Fu};
        UNROLLED for (int half = 0; half < 2; half++) {
            S8 bytes = (S8)halves[half] - int8_t(zero);
            std::memcpy(wide + (2 * row + half) * ROW_BYTES, &bytes, sizeof bytes);
        }
    }
}

// Panels of INT4.
struct Int4Panels {
    static constexpr int BLOCK = int4::BLOCK;
    static constexpr bool WIDENED = true;
    int64_t blocks, bytes;

    explicit Int4Panels(const Linear& linear) : blocks(int4::blocks(linear.k)), bytes(int4::panel_bytes(linear.k)) {}

    static const char* at(const char* panel, int64_t block) { return panel + block * int4::BLOCK_BYTES; }
    static const char* codes(const char* panel, int64_t block) { return at(panel, block) + 2 * PANEL; }
    static constexpr int zero() { return 8; }

    __attribute__((always_inline)) void add(const char* panel, int64_t block, const Totals& totals, const char*, int64_t,
                                            F32* sums) const {
        F32 scale = load(reinterpret_cast<const Bf16*>(at(panel, block)));
        UNROLLED for (int row = 0; row < TILED_ROWS; row++) sums[row] = int4::add_block(sums[row], totals.rows[row], scale);
    }
};

// Panels of BLOCKS.
template <int BITS, int SIZE>
struct BlockPanels {
    static constexpr int BLOCK = SIZE;
    static constexpr bool WIDENED = BITS == 4;
    static constexpr int64_t EACH = blocks::CHUNK / BLOCK;
    blocks::Layout layout;
    blocks::InputLayout inputs;
    int64_t blocks, bytes;

    explicit BlockPanels(const Linear& linear)
        : layout(linear.coding, linear.k), inputs(linear.k), blocks(layout.chunks * EACH), bytes(layout.panel) {}

    const char* at(const char* panel, int64_t block) const { return panel + layout.at(block / EACH); }
    const char* codes(const char* panel, int64_t block) const {
        return at(panel, block) + layout.codes + block % EACH * BLOCK * PANEL * BITS / 8;
    }
    int zero() const { return int(layout.coding.zero > 0 ? layout.coding.zero : 0); }

    __attribute__((always_inline)) void add(const char* panel, int64_t block, const Totals& totals, const char* x,
                                            int64_t stride, F32* sums) const {
        blocks::Factors factors(layout, panel, block / EACH, block % EACH, 0);
        const bool minimums = blocks::has_minimums(layout.coding);
        const int32_t excess = WIDENED ? 0 : zero();
        UNROLLED for (int row = 0; row < TILED_ROWS; row++, x += stride) {
            float step = blocks::number(x + inputs.steps + 4 * (block / EACH));
            I32 total = totals.rows[row];
            if (excess) total -= excess * word(x + inputs.totals_of(BLOCK) + 4 * block);
            sums[row] = minimums ? factors.add(sums[row], total, step, blocks::number(x + inputs.sums_of(BLOCK) + 4 * block))
                                 : factors.add(sums[row], total, step);
        }
    }
};

// Sums of a block.
__attribute__((always_inline)) inline void dot(const char* x, int64_t stride, const char* codes, Totals& totals) {
    _tile_zero(0);
    _tile_loadd(1, x, stride);
    _tile_loadd(2, codes, ROW_BYTES);
    _tile_dpbssd(0, 1, 2);
    _tile_stored(0, &totals, ROW_BYTES);
}

// A panel, and memory for its codes in 8 bits, which the first rows that meet it fill.
struct Panel {
    const char* packed;
    char* wide;
    bool fresh;
};

// Rows of inputs, and their sums.
struct Rows {
    const char* x;
    int64_t stride;
    F32* sums;
    int64_t sums_stride;

    Rows from(int row) const { return {x + row * stride, stride, sums + row * sums_stride, sums_stride}; }
};

// Begins the products of a block: where the panel is fresh, its codes are widened.
template <class Panels, bool FRESH>
__attribute__((always_inline)) inline void begin_block(const Panels& panels, const Panel& panel, const Rows& rows,
                                                       int64_t block, Totals& totals) {
    constexpr int64_t CODES = Panels::BLOCK * PANEL;
    const char* codes = panels.codes(panel.packed, block);
    if constexpr (FRESH)
        for (int64_t byte = 0; byte < CODES; byte += ROW_BYTES) __builtin_prefetch(codes + PREFETCH + byte);
    if constexpr (Panels::WIDENED) {
        char* wide = panel.wide + block * CODES;
        if constexpr (FRESH) {
            widen<Panels::BLOCK>(codes, panels.zero(), wide);
            amx::compiler_barrier();
        }
        codes = wide;
    }
    dot(rows.x + block * Panels::BLOCK, rows.stride, codes, totals);
}

// Adds the products of blocks [from, to) of a panel to the sums of TILED_ROWS rows; the first `known` keep theirs.
template <class Panels, bool FRESH>
void add_blocks(const Panels& panels, const Panel& panel, const Rows& rows, int known, int64_t from, int64_t to) {
    Totals totals[2];
    F32 sums[TILED_ROWS];
    UNROLLED for (int row = 0; row < TILED_ROWS; row++) sums[row] = from ? rows.sums[row * rows.sums_stride] : F32{};
    begin_block<Panels, FRESH>(panels, panel, rows, from, totals[from % 2]);
    for (int64_t block = from; block < to; block++) {
        if (block + 1 < to) begin_block<Panels, FRESH>(panels, panel, rows, block + 1, totals[(block + 1) % 2]);
        panels.add(panel.packed, block, totals[block % 2], rows.x, rows.stride, sums);
    }
    UNROLLED for (int row = 0; row < TILED_ROWS; row++)
        if (row >= known) rows.sums[row * rows.sums_stride] = sums[row];
}

// Sums of `count` rows, TILED_ROWS at least, with `width` panels. The last rows may overlap those before them.
template <class Panels>
void multiply(amx::Tiles& tiles, const Panels& panels, const Panel* each, int width, const Rows& rows, int count) {
    tiles.configure_block(TILED_ROWS, Panels::BLOCK);
    for (int64_t from = 0, to; from < panels.blocks; from = to) {
        to = std::min(from + STAGE / Panels::BLOCK, panels.blocks);
        for (int i = 0; i < width; i++)
            for (int row = 0; row < count; row += TILED_ROWS) {
                int first = std::min(row, count - TILED_ROWS);
                Rows own = rows.from(first);
                own.sums += i;
                auto add = each[i].fresh && row == 0 ? add_blocks<Panels, true> : add_blocks<Panels, false>;
                add(panels, each[i], own, row - first, from, to);
            }
    }
}

// Calls body(panels) with the panels of a layer.
template <class Body>
void with_panels(const Linear& linear, const Body& body) {
    const Coding& coding = linear.coding;
    if (linear.format == INT4) return body(Int4Panels(linear));
    if (coding.bits == 4 && coding.block == 16) return body(BlockPanels<4, 16>(linear));
    if (coding.bits == 4) return body(BlockPanels<4, 32>(linear));
    if (coding.block == 16) return body(BlockPanels<8, 16>(linear));
    body(BlockPanels<8, 32>(linear));
}

// Two panels of a layer at a time, and their products.
class TiledPanels {
  public:
    explicit TiledPanels(const Linear& linear) : linear_(linear) {}

    void take(const char* panels, int width) {
        static thread_local Buffer memory;
        width_ = width;
        with_panels(linear_, [&](const auto& kind) {
            using Panels = std::decay_t<decltype(kind)>;
            int64_t bytes = Panels::WIDENED ? kind.blocks * Panels::BLOCK * PANEL : 0;
            char* wide = memory.bytes(2 * bytes);
            for (int i = 0; i < width; i++) panels_[i] = {panels + i * kind.bytes, wide + i * bytes, true};
        });
    }

    // out [rows][width] = x [rows] @ the panels.
    void multiply(amx::Tiles& tiles, const char* x, int64_t stride, int rows, F32* out, int64_t out_stride) {
        with_panels(linear_, [&](const auto& kind) {
            block_tiles::multiply(tiles, kind, panels_, width_, {x, stride, out, out_stride}, rows);
        });
        for (Panel& panel : panels_) panel.fresh = false;
    }

  private:
    const Linear& linear_;
    Panel panels_[2] = {};
    int width_ = 0;
};

#else

// Other builds never call these.
struct TiledPanels {
    explicit TiledPanels(const Linear&) {}
    void take(const char*, int) {}
    void multiply(amx::Tiles&, const char*, int64_t, int, F32*, int64_t) {}
};

#endif

}  // namespace block_tiles
