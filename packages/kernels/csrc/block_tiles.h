// Products of weights in blocks with many rows of inputs on AMX tiles: the weights of a panel are rounded to bfloat16 once
// for all rows, and meet inputs in bfloat16. Tiles multiply those exactly, so that this is nearer to the products of
// float32 than inputs in 8 bits are, and blocks need no scaling in between.
#pragma once

#include "blocks.h"
#include "buffer.h"
#include "product.h"

namespace block_tiles {

// Of inputs, from which on panels are rounded; measured.
constexpr int64_t ROUNDED_ROWS = amx::HERE ? 17 : INT64_MAX;

#if defined(__AMX_BF16__) && defined(__AMX_INT8__)

// A chunk of a panel, [CHUNK] vectors of LANES outputs, as rows of a panel of bfloat16.
inline void store_chunk(const F32* weights, char* rows) {
    for (int64_t row = 0; row < blocks::CHUNK / 2; row++, rows += ROW_BYTES) {
        auto bits = [&](F32 x) { return __builtin_convertvector((U16)_mm512_cvtneps_pbh((__m512)x), U32); };
        U32 pairs = bits(weights[2 * row]) | bits(weights[2 * row + 1]) << 16;
        std::memcpy(rows, &pairs, sizeof pairs);
    }
}

template <int BITS, int BLOCK>
inline void round(const blocks::Layout& layout, const char* panel, char* rounded) {
    F32 weights[blocks::CHUNK];
    for (int64_t chunk = 0; chunk < layout.chunks; chunk++, rounded += blocks::CHUNK / 2 * ROW_BYTES) {
        blocks::dequantize<BITS, BLOCK>(layout, panel, chunk, weights);
        store_chunk(weights, rounded);
    }
}

inline void round(const blocks::Layout& layout, const char* panel, char* rounded) {
    const Coding& coding = layout.coding;
    if (coding.bits == 4 && coding.block == 16) return round<4, 16>(layout, panel, rounded);
    if (coding.bits == 4) return round<4, 32>(layout, panel, rounded);
    if (coding.block == 16) return round<8, 16>(layout, panel, rounded);
    round<8, 32>(layout, panel, rounded);
}

#else

inline void round(const blocks::Layout&, const char*, char*) {}

#endif

// Two panels, rounded, and the products with them.
class RoundedPanels {
  public:
    explicit RoundedPanels(const blocks::Layout& layout)
        : layout_(layout), bytes_(panel_bytes<Bfloats>(layout.chunks * blocks::CHUNK)) {}

    void take(const char* panels, int width) {
        static thread_local Buffer memory;
        rounded_ = memory.bytes(2 * bytes_);
        for (int i = 0; i < width; i++) round(layout_, panels + i * layout_.panel, rounded_ + i * bytes_);
    }

    // out [rows][width] = x [rows <= 32] @ the panels.
    void multiply(amx::Tiles& tiles, const char* x, int64_t stride, int rows, int width, F32* out, int64_t out_stride) {
        product::multiply<Bfloats>(tiles, true, x, stride, rows, rounded_, bytes_, width, out, out_stride);
    }

  private:
    const blocks::Layout& layout_;
    int64_t bytes_;
    char* rounded_ = nullptr;
};

}  // namespace block_tiles
