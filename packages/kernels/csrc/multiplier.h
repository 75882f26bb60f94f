// Sums of up to 32 rows of inputs and 4 panels of a linear layer: a class for each kind of format.
#pragma once

#include <type_traits>

#include "block_tiles.h"
#include "blocks.h"
#include "buffer.h"
#include "int4.h"
#include "linear.h"
#include "product.h"

constexpr int64_t TILED_ROWS = 2;  // from so many on tiles are faster than dot products; measured
// Up to so many rows, dot products may read four panels at once; measured, and 6 is what has room in 32 registers.
constexpr int64_t WIDE_ROWS = LANES == 16 ? 6 : 4;

template <class Format>
constexpr bool IS_INT4 = std::is_same_v<Format, Nibbles>;
template <class Format>
constexpr bool IN_BLOCKS = std::is_same_v<Format, Blocks> || std::is_same_v<Format, BlocksOfFloats>;

template <class Format>
int64_t panel_bytes_of(const Linear& linear) {
    if constexpr (IN_BLOCKS<Format>)
        return blocks::Layout(linear.coding, linear.k).panel;
    else
        return panel_bytes<Format>(linear.k);
}

// Panels without scales of blocks.
template <class Format>
class PlainMultiplier {
  public:
    // For rows [first, last) of the input. `call` is a number of one product, of all its parts.
    PlainMultiplier(const Linear& linear, const Operand& x, int64_t first, int64_t last, uint64_t)
        : x_(x), first_(first), rows_(last - first), bytes_(panel_bytes<Format>(linear.k)),
          on_tiles_(amx::HERE && Format::GROUP > 1 && rows_ >= TILED_ROWS) {}

    // Most panels at a time.
    int width() const { return on_tiles_ || rows_ > WIDE_ROWS ? 2 : 4; }

    // Takes the panels of the next calls.
    void take(const char* panels, int width) { panels_ = panels, width_ = width; }

    // Of rows [m, m + rows): sums [rows][4 * PARTS].
    void multiply(int64_t m, int rows, typename Format::Sums* sums) {
        product::multiply<Format>(tiles_, on_tiles_, x_.rows + m * x_.stride, x_.stride, rows, panels_, bytes_, width_,
                                  sums, 4 * PARTS, {m - first_, rows_});
    }

  private:
    const Operand& x_;
    int64_t first_, rows_, bytes_;
    bool on_tiles_;
    const char* panels_ = nullptr;
    int width_ = 0;
    amx::Tiles tiles_;
};

// Panels with scales of blocks: INT4, BLOCKS and FLOAT_BLOCKS. Tiles and dot products give the same bits.
template <class Format>
class BlockMultiplier {
  public:
    BlockMultiplier(const Linear& linear, const Operand& x, int64_t first, int64_t last, uint64_t call)
        : linear_(linear), x_(x), first_(first), rows_(last - first), tiled_(linear),
          layout_(IS_INT4<Format> ? Coding{4, 32, SINGLES, 0} : linear.coding, linear.k) {
        if constexpr (std::is_same_v<Format, Blocks>) {
            input_blocks_ = input_blocks_of(call);
            factors_ = factors_of_panels();
        }
    }

    int width() const { return on_tiles(rows_) || rows_ > WIDE_ROWS ? 2 : 4; }

    void take(const char* panels, int width) {
        panels_ = panels, width_ = width, fresh_ = true;
        if (on_tiles(rows_)) tiled_.take(panels, width);
    }

    void multiply(int64_t m, int rows, F32* sums) {
        const char* inputs = x_.rows + m * x_.stride;
        if (on_tiles(rows)) return tiled_.multiply(tiles_, inputs, x_.stride, rows, sums, 4 * PARTS);
        if constexpr (IS_INT4<Format>)
            int4::multiply(inputs, x_.stride, rows, panels_, int4::panel_bytes(linear_.k), width_, sums, 4 * PARTS);
        else
            blocks::multiply<std::is_same_v<Format, Blocks>>({layout_, inputs, x_.stride, panels_,
                                                              input_blocks_ + (m - first_), rows_, factors_, fresh_},
                                                             rows, width_, sums, 4 * PARTS);
        fresh_ = false;
    }

  private:
    const Linear& linear_;
    const Operand& x_;
    int64_t first_, rows_;
    block_tiles::TiledPanels tiled_;
    blocks::Layout layout_;
    const blocks::InputBlock* input_blocks_ = nullptr;
    blocks::Factors* factors_ = nullptr;
    bool fresh_ = true;  // no rows have met the panels, except on tiles
    const char* panels_ = nullptr;
    int width_ = 0;
    amx::Tiles tiles_;

    int64_t block_count() const { return layout_.chunks * (blocks::CHUNK / layout_.coding.block); }

    // Memory for those of as many panels as are multiplied at a time.
    blocks::Factors* factors_of_panels() const {
        static thread_local Buffer memory;
        int64_t count = rows_ > 1 ? width() * block_count() * PARTS : 0;
        return reinterpret_cast<blocks::Factors*>(memory.bytes(count * int64_t(sizeof(blocks::Factors))));
    }

    // A thread keeps them for further parts of a product.
    const blocks::InputBlock* input_blocks_of(uint64_t call) const {
        static thread_local Buffer memory;
        static thread_local uint64_t kept_call = 0;
        static thread_local int64_t kept_first = 0;
        int64_t count = block_count() * rows_;
        char* bytes = memory.bytes(count * int64_t(sizeof(blocks::InputBlock)));
        auto* input_blocks = reinterpret_cast<blocks::InputBlock*>(bytes);
        if (kept_call != call || kept_first != first_)
            blocks::write_input_blocks(layout_, x_.rows + first_ * x_.stride, x_.stride, rows_, input_blocks);
        kept_call = call, kept_first = first_;
        return input_blocks;
    }

    static bool on_tiles(int64_t rows) {
        return amx::HERE && !std::is_same_v<Format, BlocksOfFloats> && rows >= block_tiles::TILED_ROWS;
    }
};

template <class Format>
using Multiplier =
    std::conditional_t<IS_INT4<Format> || IN_BLOCKS<Format>, BlockMultiplier<Format>, PlainMultiplier<Format>>;
