#include "linear.h"

#include <algorithm>
#include <atomic>

#include "lora.h"
#include "multiplier.h"
#include "pack.h"
#include "pool.h"
#include "rounding.h"

namespace {

constexpr int64_t CHUNK_BYTES = 1 << 20;  // inputs that stay in a core's second-level cache while weights pass by
constexpr int64_t GRAIN_BYTES = 1 << 16;  // weights that are worth a task of their own
constexpr int64_t ROWS = Added::TOKENS;   // inputs at a time

inline F32 as_floats(F32 x) { return x; }
inline F32 as_floats(I32 x) { return __builtin_convertvector(x, F32); }

// gelu in the approximation by tanh, 0.5 * (1 + tanh(z)), is x / (1 + e^(-2 * z)).
inline F32 act(F32 x, int64_t gate) {
    F32 slope = gate == GELU_TANH ? (x * x * x * 0.044715f + x) * 1.5957691216f : x;
    return x / (exp(-slope) + 1.0f);
}

constexpr float LIMIT = 7, SLOPE = 1.702f;  // of clamped gates

inline F32 act_and_mul(F32 gate, F32 up, int64_t kind) {
    if (kind != CLAMPED) return act(gate, kind) * up;
    gate = gate > broadcast(LIMIT) ? broadcast(LIMIT) : gate;  // a NaN passes this, and what follows
    up = up > broadcast(LIMIT) ? broadcast(LIMIT) : up;
    up = up < broadcast(-LIMIT) ? broadcast(-LIMIT) : up;
    return (up + 1.0f) * (gate / (exp(gate * -SLOPE) + 1.0f));
}

// Scales and bias of one row of sums, and what adapters add, if any; then where they go. `sums` is [width * PARTS].
template <class Format, bool ADAPTED>
void finish_row(const Linear& linear, const Operand& x, int64_t m, int64_t panel, int width,
                const typename Format::Sums* sums, const F32* added, const Output& output) {
    F32 values[4 * PARTS];
    for (int i = 0; i < width * PARTS; i++) {
        int64_t column = panel * PANEL + i * LANES;
        if constexpr (Format::GROUP == 4) {
            I32 offset;
            std::memcpy(&offset, linear.offsets + column, sizeof offset);
            values[i] = as_floats(sums[i] - offset) * load(linear.scales + column) * x.scales[m];
        } else if constexpr (IS_INT4<Format>) {
            values[i] = sums[i] * x.scales[m];
        } else {
            values[i] = as_floats(sums[i]);
        }
        if (linear.bias) values[i] = values[i] + load(linear.bias + column);
        if (ADAPTED && added) values[i] = values[i] + added[i];
    }
    if (output.mode == Output::GATE) {
        for (int pair = 0; pair < width; pair += 2)
            for (int part = 0; part < PARTS; part++) {
                int64_t column = (panel + pair) / 2 * PANEL + part * LANES;
                int64_t count = linear.n / 2 - column;
                F32 gated = act_and_mul(values[pair * PARTS + part], values[(pair + 1) * PARTS + part], output.gate);
                if (count > LANES) count = LANES;
                if (count <= 0) continue;
                if (output.rows)
                    store_first(reinterpret_cast<Bfloats::Input*>(output.rows + m * output.stride) + column, gated,
                                count);
                else
                    store_first(output.out + m * output.stride + column, gated, count);
            }
        return;
    }
    for (int i = 0; i < width * PARTS; i++) {
        int64_t column = panel * PANEL + i * LANES, count = linear.n - column;
        if (count <= 0) return;
        if (count > LANES) count = LANES;
        float* out = output.out + m * output.stride + column;
        if (output.mode == Output::ADD) values[i] = values[i] + load_first(out, count);
        store_first(out, values[i], count);
    }
}

// Rows [first, last) of the input times panels [panel, end). ADAPTED: adapters add to some of them.
template <class Format, bool ADAPTED>
void multiply_rows(const Linear& linear, const Operand& x, int64_t first, int64_t last, int64_t panel, int64_t end,
                   const Output& output, uint64_t call) {
    Multiplier<Format> multiplier(linear, x, first, last, call);
    typename Format::Sums sums[ROWS][4 * PARTS];
    Added* added = ADAPTED ? &Added::here() : nullptr;
    int64_t bytes = panel_bytes_of<Format>(linear);
    for (int width; panel < end; panel += width) {
        width = int(std::min<int64_t>(end - panel, multiplier.width()));
        if (width == 3) width = 2;
        multiplier.take(linear.panels + panel * bytes, width);
        for (int64_t m = first; m < last; m += ROWS) {
            int rows = int(std::min(last - m, ROWS));
            multiplier.multiply(m, rows, sums[0]);
            if (ADAPTED && !added->has(m, panel, panel + width))
                added->compute(*output.addend, m, rows, panel, last - first > ROWS ? panel + width : end,
                               output.mode == Output::GATE);
            for (int row = 0; row < rows; row++)
                finish_row<Format, ADAPTED>(linear, x, m + row, panel, width, sums[row],
                                            ADAPTED ? added->at(row, panel) : nullptr, output);
        }
    }
}

template <class Format>
void multiply_part(const Linear& linear, const Operand& x, int64_t first, int64_t last, int64_t panel, int64_t end,
                   const Output& output, uint64_t call) {
    auto rows = output.addend ? multiply_rows<Format, true> : multiply_rows<Format, false>;
    rows(linear, x, first, last, panel, end, output, call);
}

// Numbers for products, from 1 on.
uint64_t next_calls(uint64_t count) {
    static std::atomic<uint64_t> last{0};
    return last.fetch_add(count) + 1;
}

int64_t panel_count(const Linear& linear, const Output& output) {
    int64_t halves = output.mode == Output::GATE ? 2 : 1;  // each of which has whole panels
    return halves * round_up(linear.n / halves, PANEL) / PANEL;
}

// Calls body(first, last) for rows that stay in a cache together.
template <class Body>
void for_chunks(int64_t m, int64_t stride, const Body& body) {
    int64_t chunk = std::max(ROWS, round_up(CHUNK_BYTES / std::max<int64_t>(stride, 1), ROWS));
    for (int64_t first = 0; first < m; first += chunk) body(first, std::min(first + chunk, m));
}

// Pairs of panels that are worth a task of their own.
template <class Format>
int64_t grain_of(const Linear& linear) {
    int64_t pair_bytes = 2 * panel_bytes_of<Format>(linear);
    return round_up(GRAIN_BYTES, pair_bytes) / pair_bytes;
}

template <class Format>
void multiply_all(const Linear& linear, const Operand& x, int64_t m, const Output& output) {
    int64_t panels = panel_count(linear, output), pairs = (panels + 1) / 2, grain = grain_of<Format>(linear);
    uint64_t call = next_calls(1);
    for_chunks(m, x.stride, [&](int64_t first, int64_t last) {
        pool::run_pieces(pairs, grain, [&](int64_t from, int64_t to) {
            int64_t end = 2 * to < panels ? 2 * to : panels;
            multiply_part<Format>(linear, x, first, last, 2 * from, end, output, call);
        });
    });
}

// The pairs of all products are numbered one after another, and a task may reach over several. Some have more rows than
// others, hence many tasks.
template <class Format>
void multiply_several(const Product* products, int64_t count) {
    constexpr int64_t TASKS = 16;  // of each thread
    int64_t all = 0;
    for (int64_t i = 0; i < count; i++) all += (panel_count(*products[i].linear, products[i].output) + 1) / 2;
    uint64_t call = next_calls(uint64_t(count));
    auto multiply_pairs = [&](int64_t from, int64_t to) {
        for (int64_t i = 0, begin = 0, pairs; begin < to; i++, begin += pairs) {
            const Product& product = products[i];
            int64_t panels = panel_count(*product.linear, product.output);
            pairs = (panels + 1) / 2;
            if (begin + pairs <= from) continue;
            int64_t panel = 2 * std::max<int64_t>(from - begin, 0), end = std::min(2 * (to - begin), panels);
            for_chunks(product.m, product.x.stride, [&](int64_t first, int64_t last) {
                multiply_part<Format>(*product.linear, product.x, first, last, panel, end, product.output,
                                      call + uint64_t(i));
            });
        }
    };
    pool::run_pieces(all, grain_of<Format>(*products[0].linear), multiply_pairs, TASKS);
}

void fill_bytes(const float* x, int64_t k, const Operand& operand, int64_t m) {
    auto* row = reinterpret_cast<Bytes::Input*>(operand.rows + m * operand.stride);
    int64_t whole = k / 4 * 4;  // what is past k meets weights of zero
    std::memset(row + whole, 0, size_t(operand.stride) - size_t(whole) * sizeof(Bytes::Input));
    operand.scales[m] = quantize(x, k, [&](int64_t i, I32 steps, int64_t count) {
        for (int64_t lane = 0; lane < count; lane++)
            row[Bytes::place(i + lane)] = Bytes::Input(uint32_t(steps[lane]) + 128u);
    });
}

int32_t sum_of(const int8_t* steps, int64_t count) {
    int32_t sum = 0;
    for (int64_t i = 0; i < count; i++) sum += steps[i];
    return sum;
}

void fill_nibbles(const float* x, int64_t k, const Operand& operand, int64_t m) {
    auto* row = reinterpret_cast<int8_t*>(operand.rows + m * operand.stride);
    int64_t blocks = int4::blocks(k), inputs = blocks * int4::BLOCK;
    std::memset(row + k, 0, size_t(inputs - k));
    operand.scales[m] = quantize(x, k, [&](int64_t i, I32 steps, int64_t count) { store_bytes(row + i, steps, count); });
    for (int64_t block = 0; block < blocks; block++) {
        int32_t excess = -8 * sum_of(row + block * int4::BLOCK, int4::BLOCK);
        std::memcpy(row + inputs + 4 * block, &excess, sizeof excess);
    }
}

void fill_blocks(const float* x, int64_t k, const Operand& operand, int64_t m) {
    auto* row = reinterpret_cast<int8_t*>(operand.rows + m * operand.stride);
    blocks::InputLayout layout(k);
    auto set = [&](int64_t at, auto value) { std::memcpy(row + at, &value, sizeof value); };
    std::memset(row + k, 0, size_t(layout.bytes - k));
    for (int64_t chunk = 0; chunk < blocks::chunks(k); chunk++) {
        constexpr int64_t HALF = blocks::CHUNK / 2;
        int8_t* steps = row + chunk * blocks::CHUNK;
        F32 sums[2] = {};  // whole numbers
        float step = quantize(x + chunk * blocks::CHUNK, std::min(k - chunk * blocks::CHUNK, blocks::CHUNK),
                              [&](int64_t i, I32 some, int64_t count) {
                                  store_bytes(steps + i, some, count);
                                  sums[i / HALF] = sums[i / HALF] + as_floats(some);
                              });
        int32_t halves[2] = {int32_t(sum(sums[0])), int32_t(sum(sums[1]))}, total = halves[0] + halves[1];
        set(layout.steps + 4 * chunk, step);
        set(layout.totals + 4 * chunk, total);
        set(layout.sums + 4 * chunk, float(total) * step);
        for (int64_t half = 0; half < 2; half++) {
            set(layout.half_totals + 8 * chunk + 4 * half, halves[half]);
            set(layout.half_sums + 8 * chunk + 4 * half, float(halves[half]) * step);
        }
    }
}

}  // namespace

int64_t operand_stride(int64_t format, int64_t k) {
    switch (format) {
        case FLOAT32: return input_bytes<Floats>(k);
        case BFLOAT16: return input_bytes<Bfloats>(k);
        case INT8: return input_bytes<Bytes>(k);
        case BLOCKS: return blocks::InputLayout(k).bytes;
        case FLOAT_BLOCKS: return 4 * blocks::CHUNK * blocks::chunks(k);
        default: return int4::operand_stride(k);
    }
}

void fill_operand(int64_t format, const float* x, int64_t k, const Operand& operand, int64_t m) {
    char* row = operand.rows + m * operand.stride;
    switch (format) {
        case FLOAT32:
        case FLOAT_BLOCKS:
            std::memcpy(row, x, size_t(4 * k));
            std::memset(row + 4 * k, 0, size_t(operand.stride - 4 * k));
            break;
        case BFLOAT16:
            over(k,
                 [&](int64_t i, auto get, auto put) { put(reinterpret_cast<Bfloats::Input*>(row) + i, get(x + i)); });
            std::memset(row + k * int64_t(sizeof(Bfloats::Input)), 0,
                        size_t(operand.stride - k * int64_t(sizeof(Bfloats::Input))));
            break;
        case INT8: fill_bytes(x, k, operand, m); break;
        case BLOCKS: fill_blocks(x, k, operand, m); break;
        default: fill_nibbles(x, k, operand, m);
    }
}

void multiply(const Linear& linear, const Operand& x, int64_t m, const Output& output) {
    switch (linear.format) {
        case FLOAT32: return multiply_all<Floats>(linear, x, m, output);
        case BFLOAT16: return multiply_all<Bfloats>(linear, x, m, output);
        case INT8: return multiply_all<Bytes>(linear, x, m, output);
        case BLOCKS: return multiply_all<Blocks>(linear, x, m, output);
        case FLOAT_BLOCKS: return multiply_all<BlocksOfFloats>(linear, x, m, output);
        default: return multiply_all<Nibbles>(linear, x, m, output);
    }
}

void multiply(const Product* products, int64_t count) {
    if (count == 1) return multiply(*products[0].linear, products[0].x, products[0].m, products[0].output);
    switch (count ? products[0].linear->format : FLOAT32) {
        case FLOAT32: return multiply_several<Floats>(products, count);
        case BFLOAT16: return multiply_several<Bfloats>(products, count);
        case INT8: return multiply_several<Bytes>(products, count);
        case BLOCKS: return multiply_several<Blocks>(products, count);
        case FLOAT_BLOCKS: return multiply_several<BlocksOfFloats>(products, count);
        default: return multiply_several<Nibbles>(products, count);
    }
}

void unpack_row(const Linear& linear, int64_t index, float* out) {
    int64_t lane = index % PANEL;
    if (linear.format >= BLOCKS) {
        blocks::Layout layout(linear.coding, linear.k);
        return blocks::unpack(layout, linear.panels + index / PANEL * layout.panel, lane, linear.k, out);
    }
    const char* panel = linear.panels + index / PANEL * packed_bytes(1, linear.k, linear.format);
    for (int64_t i = 0; i < linear.k; i++) {
        switch (linear.format) {
            case FLOAT32: out[i] = reinterpret_cast<const float*>(panel)[i * PANEL + lane]; break;
            case BFLOAT16:
                out[i] = to_float(reinterpret_cast<const Bf16*>(panel)[(i / 2 * PANEL + lane) * 2 + i % 2]);
                break;
            case INT8: out[i] = float(int8_t(panel[(i / 4 * PANEL + lane) * 4 + i % 4])) * linear.scales[index]; break;
            default: out[i] = int4::value(panel, lane, i);
        }
    }
}
