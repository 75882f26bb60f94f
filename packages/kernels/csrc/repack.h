// Repacking of rows into panels (see format.h): weights, and the keys and values of a block of the cache.
#pragma once

#include <algorithm>

#include "format.h"
#include "paged_block.h"

// LANES words of 4 bytes of an array of n elements, from element i on; zero past the end. WHOLE: that is not reached.
template <bool WHOLE = false, class T>
inline F32 load_words(const T* p, int64_t i, int64_t n) {
    F32 words = {};
    int64_t bytes = WHOLE ? sizeof words : std::min<int64_t>((n - i) * int64_t(sizeof(T)), sizeof words);
    if (bytes == sizeof words)
        std::memcpy(&words, p + i, sizeof words);
    else if (bytes > 0)
        std::memcpy(&words, p + i, size_t(bytes));
    return words;
}

// LANES rows of n elements as columns of a panel. WHOLE: all are there, and end with a row of tiles; else a null is a row
// of zeros.
template <class Format, bool WHOLE, class T>
void turn(const T* const* rows, int64_t n, char* panel) {
    for (int64_t row = 0, count = panel_rows<Format>(n); row < count; row += LANES) {
        F32 square[LANES];
        UNROLLED for (int i = 0; i < LANES; i++)
            square[i] = WHOLE || rows[i] ? load_words<WHOLE>(rows[i], row * Format::GROUP, n) : F32{};
        transpose(square);
        UNROLLED for (int i = 0; i < LANES; i++) std::memcpy(panel + (row + i) * ROW_BYTES, &square[i], sizeof(F32));
    }
}

// LANES keys of a block, from `column` on.
template <class Format, bool WHOLE, class T>
void lay_out_columns(const T* cache, const BlockOffsets& offsets, int64_t n, int64_t column, char* out) {
    const T* keys[LANES];
    for (int i = 0; i < LANES; i++) keys[i] = cache + offsets.readable_offset(column + i);
    turn<Format, WHOLE>(keys, n, out + column / PANEL * panel_rows<Format>(n) * ROW_BYTES + column % PANEL * 4);
}

// The keys of a block as panels with a key in each column. Columns of keys that no query sees hold anything. Calls
// before(column) before each LANES columns. By itself, since it needs all registers.
template <class Format, class Before, class T = typename Format::Element>
__attribute__((noinline)) void repack_keys(const T* cache, const BlockOffsets& offsets, int64_t n, char* out,
                                           Before before) {
    bool whole = n % (TILE_ROWS * Format::GROUP) == 0;
    for (int64_t column = offsets.first / LANES * LANES; column < offsets.last; column += LANES) {
        before(column);
        whole ? lay_out_columns<Format, true>(cache, offsets, n, column, out)
              : lay_out_columns<Format, false>(cache, offsets, n, column, out);
    }
}

// LANES words of the values of GROUP keys, those of one element of head_dim side by side: element d of all, d + 1 ...
inline F32 value_words(const float* const* values, int64_t d, int64_t n) {
    return values[0] ? load_words(values[0], d, n) : F32{};
}

inline F32 value_words(const Bf16* const* values, int64_t d, int64_t n) {
    F32 first = values[0] ? load_first(values[0] + d, std::clamp<int64_t>(n - d, 0, LANES)) : F32{};
    F32 second = values[1] ? load_first(values[1] + d, std::clamp<int64_t>(n - d, 0, LANES)) : F32{};
    return bit_cast<F32>(bit_cast<U32>(first) >> 16 | bit_cast<U32>(second));
}

// The same where all are there, and whole.
inline F32 whole_words(const float* const* values, int64_t d) { return load(values[0] + d); }

inline F32 whole_words(const Bf16* const* values, int64_t d) {
    return bit_cast<F32>(bit_cast<U32>(load(values[0] + d)) >> 16 | bit_cast<U32>(load(values[1] + d)));
}

// The values of a block as panels with an element of head_dim in each column.
template <class Format, class T = typename Format::Element>
void repack_values(const T* cache, const BlockOffsets& offsets, int64_t n, char* out) {
    int64_t rows = BLOCK / Format::GROUP;
    auto put = [&](int64_t row, int64_t d, F32 words) {
        std::memcpy(out + (d / PANEL * rows + row) * ROW_BYTES + d % PANEL * 4, &words, sizeof words);
    };
    bool whole = offsets.first == 0 && offsets.last == BLOCK && n % PANEL == 0;
    for (int64_t row = 0; row < rows; row++) {
        const T* values[Format::GROUP];
        for (int64_t i = 0; i < Format::GROUP; i++) {
            int64_t offset = offsets.offset[row * Format::GROUP + i];
            values[i] = offset == HIDDEN ? nullptr : cache + offset;
        }
        if (whole)
            for (int64_t d = 0; d < n; d += LANES) put(row, d, whole_words(values, d));
        else
            for (int64_t d = 0; d < round_up(n, PANEL); d += LANES) put(row, d, value_words(values, d, n));
    }
}
