#include "pack.h"

#include <algorithm>
#include <stdexcept>
#include <type_traits>
#include <vector>

#include "int4.h"
#include "repack.h"
#include "pool.h"
#include "rounding.h"

namespace {

constexpr int64_t GRAIN = 4;  // panels of a task

template <class T>
using Plain = std::conditional_t<std::is_same_v<T, float>, Floats, Bfloats>;

// LANES rows of k elements into columns of a panel; a null is a row of zeros.
template <class Format>
void put_columns(const typename Format::Element* const* rows, bool all, int64_t k, char* panel) {
    bool whole = all && k % (TILE_ROWS * Format::GROUP) == 0;
    whole ? turn<Format, true>(rows, k, panel) : turn<Format, false>(rows, k, panel);
}

// Outputs [first, first + PANEL), as many of them as there are, as they are.
template <class Format>
void pack_plain(const typename Format::Element* weight, int64_t n, int64_t k, int64_t first, char* panel) {
    for (int64_t lane = 0; lane < PANEL; lane += LANES) {
        const typename Format::Element* rows[LANES];
        for (int i = 0; i < LANES; i++) rows[i] = first + lane + i < n ? weight + (first + lane + i) * k : nullptr;
        put_columns<Format>(rows, first + lane + LANES <= n, k, panel + 4 * lane);
    }
}

// The same, rounded to 8 bits: see `Linear` for scales and offsets. `steps` has room for a panel.
template <class T>
void pack_int8(const T* weight, int64_t n, int64_t k, int64_t first, int8_t* steps, char* panel, float* scales,
               int32_t* offsets) {
    const int8_t* rows[PANEL];
    for (int64_t lane = 0; lane < PANEL; lane++) {
        rows[lane] = nullptr;
        scales[lane] = 0;
        offsets[lane] = 0;
        if (first + lane >= n) continue;
        int8_t* row = steps + lane * k;
        U32 sum = {};  // wraps where a row holds no numbers
        scales[lane] = quantize(weight + (first + lane) * k, k, [&](int64_t i, I32 some, int64_t count) {
            store_bytes(row + i, some, count);
            sum += bit_cast<U32>(some);  // zero past the end
        });
        uint32_t total = 0;
        for (int i = 0; i < LANES; i++) total += sum[i];
        offsets[lane] = int32_t(128 * total);
        rows[lane] = row;
    }
    for (int64_t lane = 0; lane < PANEL; lane += LANES)
        put_columns<Bytes>(rows + lane, first + lane + LANES <= n, k, panel + 4 * lane);
}

// Rounds a block of 32 inputs to 4 bits, 8 more than they mean: of what is largest, the first becomes -8 or nearly,
// because there is no 8. Returns what a step means, which is NaN as in `quantize`.
Bf16 round_block(const float* x, uint8_t* codes) {
    float most = largest(x, int4::BLOCK), extreme = most;
    for (int64_t i = int4::BLOCK - 1; i >= 0; i--)
        if (x[i] == most || x[i] == -most) extreme = x[i];
    Bf16 scale = to_bf16(extreme / -8);
    float divisor = to_float(scale) == 0 ? 1 : to_float(scale);
    for (int64_t i = 0; i < int4::BLOCK; i += LANES) {
        I32 steps = nearest(load(x + i) / divisor);
        steps = steps < -8 ? I32{} - 8 : steps > 7 ? I32{} + 7 : steps;
        store_bytes(codes + i, steps + 8, LANES);
    }
    return scale;
}

// Outputs [first, first + PANEL), as many of them as there are, rounded to 4 bits: see int4.h.
template <class T>
void pack_int4(const T* weight, int64_t n, int64_t k, int64_t first, char* panel) {
    std::memset(panel, 0, size_t(int4::panel_bytes(k)));  // scales of zero where there is no output
    for (int64_t lane = 0; lane < PANEL && first + lane < n; lane++)
        for (int64_t block = 0; block < int4::blocks(k); block++) {
            float x[int4::BLOCK] = {};
            uint8_t codes[int4::BLOCK];
            int64_t from = block * int4::BLOCK, count = std::min(k - from, int4::BLOCK);
            over(count, [&](int64_t i, auto get, auto put) { put(x + i, get(weight + (first + lane) * k + from + i)); });
            Bf16 scale = round_block(x, codes);
            char* at = panel + block * int4::BLOCK_BYTES;
            std::memcpy(at + 2 * lane, &scale, sizeof scale);
            for (int64_t row = 0; row < 4; row++) {
                int32_t pairs = word(codes + 8 * row) | word(codes + 8 * row + 4) << 4;
                std::memcpy(at + 2 * PANEL + row * ROW_BYTES + 4 * lane, &pairs, sizeof pairs);
            }
        }
}

template <class T>
void pack_rows(const T* weight, bool as_it_is, int64_t n, int64_t k, const Packing& packing) {
    int64_t bytes = packed_bytes(1, k, packing.format);
    pool::run_pieces(round_up(n, PANEL) / PANEL, GRAIN, [&](int64_t from, int64_t to) {
        std::vector<int8_t> steps(size_t(packing.format == INT8 ? PANEL * k : 0));
        for (int64_t source = from; source < to; source++) {
            int64_t target = packing.start + source * packing.step, first = source * PANEL;
            char* panel = packing.panels + target * bytes;
            if (as_it_is)
                pack_plain<Plain<T>>(weight, n, k, first, panel);
            else if (packing.format == INT8)
                pack_int8(weight, n, k, first, steps.data(), panel, packing.scales + target * PANEL,
                          packing.offsets + target * PANEL);
            else
                pack_int4(weight, n, k, first, panel);
        }
    });
}

}  // namespace

int64_t packed_bytes(int64_t n, int64_t k, int64_t format) {
    int64_t panels = round_up(n, PANEL) / PANEL;
    switch (format) {
        case FLOAT32: return panels * panel_bytes<Floats>(k);
        case BFLOAT16: return panels * panel_bytes<Bfloats>(k);
        case INT8: return panels * panel_bytes<Bytes>(k);
        default: return panels * panel_bytes<Nibbles>(k);
    }
}

void pack(const void* weight, int64_t source, int64_t n, int64_t k, const Packing& packing) {
    bool as_it_is = packing.format == source;
    if (!as_it_is && !is_quantized(packing.format)) throw std::invalid_argument("weights are rounded to 8 or 4 bits");
    if (source == FLOAT32)
        pack_rows(static_cast<const float*>(weight), as_it_is, n, k, packing);
    else
        pack_rows(static_cast<const Bf16*>(weight), as_it_is, n, k, packing);
}
