// Packing of weights in blocks: see blocks.h for the layout.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <numeric>
#include <stdexcept>

#include "blocks.h"
#include "pack.h"
#include "pool.h"

namespace {

constexpr int64_t GRAIN = 4;       // panels of a task
constexpr int64_t ROW_GRAIN = 64;  // rows of a task that only reads scales

int64_t blocks_of(const BlockSource& source) { return (source.k + source.coding.block - 1) / source.coding.block; }

// As float16; another value where there is none.
uint16_t to_half(float x) {
    uint32_t bits = bit_cast<uint32_t>(x), sign = bits >> 16 & 0x8000u, size = bits & 0x7FFFFFFFu;
    if (size < 0x38800000u) return uint16_t(sign | uint32_t(bit_cast<float>(size) * 16777216.0f));  // subnormal: 2^24
    return uint16_t(sign | ((size - (112u << 23)) >> 13 & 0x7FFFu));
}

float from_half(uint16_t half) {
    uint32_t size = half & 0x7FFFu;
    float value = size < 0x400u ? float(size) * 5.9604645e-8f : bit_cast<float>((size << 13) + (112u << 23));
    return half & 0x8000u ? -value : value;
}

bool is_half(float x) { return std::fabs(x) < 65536.0f && from_half(to_half(x)) == x; }

// The largest float of which `count` values are whole multiples, or 0 where all are zero; NaN where there is none that
// int8 multiples reach.
float unit_of(const float* values, int64_t count) {
    constexpr int64_t MOST = blocks::SUPER_BLOCK / 16;
    constexpr int MANTISSA = 24;
    int64_t parts[MOST];
    int exponents[MOST], lowest = INT32_MAX;
    for (int64_t i = 0; i < count; i++) {
        if (!std::isfinite(values[i])) return NAN;
        parts[i] = int64_t(std::ldexp(std::frexp(std::fabs(values[i]), &exponents[i]), MANTISSA));
        if (parts[i]) lowest = std::min(lowest, exponents[i]);
    }
    int64_t common = 0, largest = 0;
    for (int64_t i = 0; i < count; i++) {
        if (!parts[i]) continue;
        if (exponents[i] - lowest > 7 + MANTISSA) return NAN;
        parts[i] <<= exponents[i] - lowest;
        common = std::gcd(common, parts[i]);
        largest = std::max(largest, parts[i]);
    }
    if (!common) return 0;
    return largest / common <= 127 ? float(std::ldexp(double(common), lowest - MANTISSA)) : NAN;
}

bool are_steps(const BlockSource& source, const float* all, int64_t row) {
    int64_t each = blocks::SUPER_BLOCK / source.coding.block, count = blocks_of(source);
    for (int64_t first = 0; first < count; first += each)
        if (std::isnan(unit_of(all + row * count + first, std::min(each, count - first)))) return false;
    return true;
}

bool are_halves(const BlockSource& source, const float* all, int64_t row) {
    const float* values = all + row * blocks_of(source);
    return std::all_of(values, values + blocks_of(source), is_half);
}

// Whether holds(row) for all rows.
template <class Test>
bool in_all_rows(int64_t rows, const Test& holds) {
    std::atomic<bool> all{true};
    pool::run_pieces(rows, ROW_GRAIN, [&](int64_t from, int64_t to) {
        for (int64_t row = from; row < to && all; row++)
            if (!holds(row)) all = false;
    });
    return all;
}

// The code of zero in the first block that has a scale, or -1 if that is no code.
int64_t find_zero(const BlockSource& source) {
    int64_t count = source.n * blocks_of(source), most = source.coding.bits == 4 ? 15 : 127;
    if (!source.minimums) return 0;
    const float* first = std::find_if(source.scales, source.scales + count, [](float scale) { return scale != 0; });
    if (first == source.scales + count) return 0;
    float zero = -source.minimums[first - source.scales] / *first;
    return zero >= 0 && zero <= float(most) ? int64_t(std::lround(zero)) : -1;
}

bool have_zero(const BlockSource& source, int64_t row, int64_t zero) {
    const float *scales = source.scales + row * blocks_of(source), *minimums = source.minimums + row * blocks_of(source);
    for (int64_t i = 0; i < blocks_of(source); i++)
        if (minimums[i] != -float(zero) * scales[i]) return false;
    return true;
}

// A scale or a minimum as its type stores it.
void store_value(float x, float unit, int64_t scale_type, char* values, int64_t lane) {
    if (scale_type == STEPS) {
        values[lane] = char(unit ? std::lround(x / unit) : 0);
    } else if (scale_type == HALVES) {
        uint16_t half = to_half(x);
        std::memcpy(values + 2 * lane, &half, sizeof half);
    } else {
        std::memcpy(values + 4 * lane, &x, sizeof x);
    }
}

// Writes the scales of a row (ARRAY 0) or its minimums (1) into a panel; value(block) gives those of the source.
template <int ARRAY, class Value>
void write_values(const BlockSource& source, const blocks::Layout& layout, int64_t lane, char* panel,
                  const Value& value) {
    const Coding& coding = layout.coding;
    int64_t each = blocks::SUPER_BLOCK / coding.block;
    for (int64_t first = 0; first < blocks_of(source); first += each) {
        float values[blocks::SUPER_BLOCK / 16], unit = 0;
        int64_t count = std::min(each, blocks_of(source) - first);
        for (int64_t i = 0; i < count; i++) values[i] = value(first + i);
        if (coding.scale_type == STEPS) {
            unit = unit_of(values, count);
            std::memcpy(panel + first / each * layout.units + ARRAY * 4 * PANEL + 4 * lane, &unit, sizeof unit);
        }
        for (int64_t i = 0; i < count; i++) {
            int64_t input = (first + i) * coding.block;
            int64_t block = input % blocks::CHUNK / coding.block;
            char* at = panel + layout.at(input / blocks::CHUNK) + block * layout.each + ARRAY * layout.values;
            store_value(values[i], unit, coding.scale_type, at, lane);
        }
    }
}

// The codes of 32 inputs; zero past the last.
void read_codes(const BlockSource& source, int64_t row, int64_t chunk, uint8_t* codes) {
    constexpr int64_t HALF = blocks::CHUNK / 2;
    if (source.coding.bits == 4) {
        const uint8_t* pairs = source.codes + row * source.k / 2 + chunk * HALF;
        for (int64_t i = 0; i < HALF; i++) {
            codes[i] = pairs[i] & 15;
            codes[i + HALF] = pairs[i] >> 4;
        }
        return;
    }
    int64_t count = std::min(source.k - chunk * blocks::CHUNK, blocks::CHUNK);
    std::memcpy(codes, source.codes + row * source.k + chunk * blocks::CHUNK, size_t(count));
    std::fill(codes + count, codes + blocks::CHUNK, uint8_t(0));
}

void write_codes(const BlockSource& source, const blocks::Layout& layout, int64_t row, int64_t lane, char* panel) {
    for (int64_t chunk = 0; chunk < layout.chunks; chunk++) {
        uint8_t codes[blocks::CHUNK];
        read_codes(source, row, chunk, codes);
        char* at = panel + layout.at(chunk) + layout.codes + 4 * lane;
        int64_t each = layout.coding.bits == 4 ? 8 : 4;
        for (int64_t i = 0; i < blocks::CHUNK; i += each, at += ROW_BYTES) {
            int32_t words = layout.coding.bits == 4 ? word(codes + i) | word(codes + i + 4) << 4 : word(codes + i);
            std::memcpy(at, &words, sizeof words);
        }
    }
}

void write_output(const BlockSource& source, const blocks::Layout& layout, int64_t row, int64_t lane, char* panel) {
    const float* scales = source.scales + row * blocks_of(source);
    write_values<0>(source, layout, lane, panel, [&](int64_t block) { return scales[block]; });
    if (blocks::has_minimums(layout.coding))
        write_values<1>(source, layout, lane, panel, [&](int64_t block) {
            if (!source.minimums) return 0.0f;
            return source.minimums[row * blocks_of(source) + block];
        });
    write_codes(source, layout, row, lane, panel);
}

}  // namespace

void choose_coding(BlockSource& source) {
    int64_t zero = find_zero(source);
    if (zero > 0 || (zero == 0 && source.minimums))
        if (!in_all_rows(source.n, [&](int64_t row) { return have_zero(source, row, zero); })) zero = -1;
    source.coding.zero = zero;
    const float* minimums = zero < 0 ? source.minimums : nullptr;
    auto all_are = [&](auto are) {
        return in_all_rows(source.n, [&](int64_t row) {
            return are(source, source.scales, row) && (!minimums || are(source, minimums, row));
        });
    };
    source.coding.scale_type = all_are(are_steps) ? STEPS : all_are(are_halves) ? HALVES : SINGLES;
}

int64_t packed_block_bytes(int64_t n, int64_t k, const Coding& coding) {
    return round_up(n, PANEL) / PANEL * blocks::Layout(coding, k).panel;
}

void pack_blocks(const BlockSource& source, const Coding& coding, const Packing& packing) {
    if (coding.bits != source.coding.bits || coding.block != source.coding.block)
        throw std::invalid_argument("blocks are packed in the bits and sizes that they have");
    blocks::Layout layout(coding, source.k);
    pool::run_pieces(round_up(source.n, PANEL) / PANEL, GRAIN, [&](int64_t from, int64_t to) {
        for (int64_t first = from; first < to; first++) {
            char* panel = packing.panels + (packing.start + first * packing.step) * layout.panel;
            std::memset(panel, 0, size_t(layout.panel));  // scales of zero where there is no output
            for (int64_t lane = 0; lane < PANEL && first * PANEL + lane < source.n; lane++)
                write_output(source, layout, first * PANEL + lane, lane, panel);
        }
    });
}
