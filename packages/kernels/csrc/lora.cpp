// x @ a.T is a parallel loop, in which a few rows of `a` are a task for each run of tokens. Its product with `b` is computed
// panel by panel as the products are to which it is added, so that it need not go through memory. `a` and `b` are read
// where they lie, once for the tokens of a run: these are too few for packing.
#include "lora.h"

#include <algorithm>
#include <type_traits>

#include "buffer.h"
#include "pool.h"
#include "product.h"

namespace {

constexpr int RANKS = 4;                                      // rows of `a` at a time
constexpr int TALL_A = LANES == 16 ? 4 : 2;                   // and tokens, at most
constexpr int TALL_B = LANES == 16 ? 8 : LANES == 8 ? 4 : 2;  // tokens for a panel of `b`, at most
constexpr int64_t AHEAD_A = 256, AHEAD_B = 64;                // floats of a row to prefetch ahead
constexpr int64_t OUT_STRIDE = Added::PANELS * PARTS;         // vectors

// Tokens [first, last), and the adapter they have.
struct Run {
    int64_t first, last, rank;
    const float *a, *b;

    Run(const Adapters& adapters, const AdapterRows& rows, int64_t index) {
        const int32_t* entry = rows.table + 3 * index;
        int64_t place = entry[0];
        first = entry[1], last = entry[2], rank = rows.ranks[place];
        a = adapters.a + place * adapters.parts * adapters.rank * adapters.inputs;
        b = adapters.b + place * adapters.rank * adapters.outputs;
    }
};

// Calls body(count, row) for rows [from, to), `MOST` of them at a time, where `count` is known to the compiler.
template <int MOST, class Body>
void in_blocks(int64_t from, int64_t to, const Body& body) {
    for (; from + MOST <= to; from += MOST) body(std::integral_constant<int, MOST>{}, from);
    if constexpr (MOST > 1) in_blocks<MOST - 1>(from, to, body);
}

// Adds the products of `elements` <= LANES elements, from number i on, to the sums of each token and row of `a`.
template <int COUNT>
__attribute__((always_inline)) inline void add_products(const float* x, int64_t n, const float* const (&a)[RANKS],
                                                        int64_t i, int64_t elements, F32 (&sums)[TALL_A][RANKS]) {
    F32 weights[RANKS];
    UNROLLED for (int row = 0; row < RANKS; row++) weights[row] = load_first(a[row] + i, elements);
    UNROLLED for (int token = 0; token < COUNT; token++) {
        F32 inputs = load_first(x + token * n + i, elements);
        UNROLLED for (int row = 0; row < RANKS; row++)
            sums[token][row] = settled(weights[row] * inputs + sums[token][row]);
    }
}

// Writes the sum of each vector, whose order of additions is the same for all.
void add_up(const F32 (&sums)[TALL_A][RANKS], int tokens, float* out, int64_t stride) {
    float totals[TALL_A * RANKS];
    for (int first = 0; first < TALL_A * RANKS; first += LANES) {
        F32 square[LANES];
        for (int i = 0; i < LANES; i++) square[i] = sums[(first + i) / RANKS][(first + i) % RANKS];
        transpose(square);
        for (int i = 1; i < LANES; i++) square[0] = square[0] + square[i];
        store(totals + first, square[0]);
    }
    for (int token = 0; token < tokens; token++) std::copy_n(totals + token * RANKS, RANKS, out + token * stride);
}

// out [COUNT][RANKS] = x [COUNT, n] @ a [RANKS, n].T.
template <int COUNT>
void shrink_block(const float* x, int64_t n, const float* const (&a)[RANKS], float* out, int64_t stride) {
    F32 sums[TALL_A][RANKS] = {};
    int64_t i = 0, next = (RANKS - 1) * n;  // after its end a row goes on as the one that is next to be read
    for (; i + LANES <= n; i += LANES) {
        for (const float* row : a) __builtin_prefetch(row + i + AHEAD_A + (i + AHEAD_A < n ? 0 : next));
        add_products<COUNT>(x, n, a, i, LANES, sums);
    }
    if (i < n) add_products<COUNT>(x, n, a, i, n - i, sums);
    add_up(sums, COUNT, out, stride);
}

// RANKS rows of a part of `a`, from number `rank` on, for all tokens of a run. Past the last it is repeated.
void shrink_run(const Adapters& adapters, const Run& run, int64_t part, int64_t rank, const float* x, float* low,
                int64_t stride) {
    const float* a[RANKS];
    for (int row = 0; row < RANKS; row++)
        a[row] = run.a + (part * adapters.rank + std::min(rank + row, run.rank - 1)) * adapters.inputs;
    in_blocks<TALL_A>(run.first, run.last, [&](auto count, int64_t token) {
        shrink_block<count>(x + token * adapters.inputs, adapters.inputs, a, low + token * stride, stride);
    });
}

// Columns of a part in a panel: `count` of them from lane `lane` on.
struct Columns {
    int64_t part, column, lane, count;
};

// Calls body(columns) for each part that a panel has columns of.
template <class Body>
void for_columns(const Adapters& adapters, int64_t panel, bool alternate, const Body& body) {
    for (int64_t part = 0, begin = 0, end; part < adapters.parts; part++, begin = end) {
        end = begin + adapters.sizes[part];
        if (alternate && panel % adapters.parts != part) continue;
        int64_t column = alternate ? begin + panel / adapters.parts * PANEL : panel * PANEL;
        int64_t from = std::max(column, begin), to = std::min(column + PANEL, end);
        if (from < to) body(Columns{part, from, from - column, to - from});
    }
}

// out [COUNT][PARTS], in rows OUT_STRIDE apart = low [COUNT, rank] @ b [rank, PANEL], in rows `outputs` apart.
template <int COUNT>
void expand_block(const float* low, int64_t stride, const float* b, int64_t outputs, int64_t rank, F32* out) {
    F32 sums[COUNT][PARTS] = {};
    for (int64_t r = 0; r < rank; r++, b += outputs) {
        F32 weights[PARTS];
        __builtin_prefetch(b + AHEAD_B);
        UNROLLED for (int i = 0; i < PARTS; i++) weights[i] = load(b + i * LANES);
        UNROLLED for (int token = 0; token < COUNT; token++)
            UNROLLED for (int i = 0; i < PARTS; i++)
                sums[token][i] = settled(weights[i] * low[token * stride + r] + sums[token][i]);
    }
    UNROLLED for (int token = 0; token < COUNT; token++)
        UNROLLED for (int i = 0; i < PARTS; i++) out[token * OUT_STRIDE + i] = sums[token][i];
}

// The same for some columns of one token. Those on their left stay as they are.
void expand_some(const float* low, const float* b, int64_t outputs, int64_t rank, const Columns& columns, F32* out) {
    float sums[PANEL] = {};
    if (columns.lane) std::memcpy(sums, out, sizeof sums);  // those of the part before
    for (int64_t i = 0; i < columns.count; i++) {
        float sum = 0;
        for (int64_t r = 0; r < rank; r++) sum = b[r * outputs + i] * low[r] + sum;
        sums[columns.lane + i] = sum;
    }
    std::memcpy(out, sums, sizeof sums);
}

// For all tokens of a run.
void expand_run(const Addend& addend, const Run& run, const Columns& columns, F32* out) {
    int64_t outputs = addend.adapters->outputs, stride = addend.adapters->parts * addend.slots;
    const float *low = addend.low + run.first * stride + columns.part * addend.slots, *b = run.b + columns.column;
    int64_t tokens = run.last - run.first;
    if (columns.count == PANEL)
        return in_blocks<TALL_B>(0, tokens, [&](auto count, int64_t row) {
            expand_block<count>(low + row * stride, stride, b, outputs, run.rank, out + row * OUT_STRIDE);
        });
    for (int64_t row = 0; row < tokens; row++)
        expand_some(low + row * stride, b, outputs, run.rank, columns, out + row * OUT_STRIDE);
}

}  // namespace

const char* find_fault(const AdapterRows& rows, int64_t tokens) {
    int64_t last = 0;
    for (const int32_t* entry = rows.table; entry < rows.table + 3 * rows.runs; entry += 3) {
        if (entry[0] < 0 || entry[0] >= rows.places) return "an adapter is not at any place";
        if (entry[1] < last || entry[2] < entry[1] || entry[2] > tokens)
            return "runs of tokens with an adapter are not in the order of tokens";
        last = entry[2];
    }
    return nullptr;
}

Addend shrink(const Adapters& adapters, const AdapterRows& rows, const float* x) {
    static thread_local Buffer buffer;
    int64_t most = 0, tokens = 0;
    for (int64_t run = 0; run < rows.runs; run++) {
        const int32_t* entry = rows.table + 3 * run;
        most = std::max(most, rows.ranks[entry[0]]), tokens += entry[2] - entry[1];
    }
    int64_t groups = (most + RANKS - 1) / RANKS, items = adapters.parts * groups, stride = items * RANKS;
    int64_t work = std::max<int64_t>(RANKS * adapters.inputs * tokens / rows.runs, 1);
    float* low = buffer.floats(rows.table[3 * rows.runs - 1] * stride);
    pool::run_pieces(rows.runs * items, (pool::GRAIN + work - 1) / work, [&](int64_t from, int64_t to) {
        for (int64_t i = from; i < to; i++) {
            Run run(adapters, rows, i / items);
            int64_t part = i % items / groups, rank = i % groups * RANKS;
            if (rank < run.rank) shrink_run(adapters, run, part, rank, x, low + i % items * RANKS, stride);
        }
    });
    return {&adapters, &rows, low, groups * RANKS};
}

Added& Added::here() {
    static thread_local Added added;
    added.end = 0;
    return added;
}

void Added::compute(const Addend& addend, int64_t from, int tokens, int64_t first, int64_t last, bool alternate) {
    const AdapterRows& rows = *addend.rows;
    token = from, panel = first, end = last = std::min(last, first + PANELS);
    std::fill_n(any, tokens, false);
    int64_t index = 0;
    while (index < rows.runs && rows.table[3 * index + 2] <= token) index++;
    for (; index < rows.runs && rows.table[3 * index + 1] < token + tokens; index++) {
        Run run(*addend.adapters, rows, index);
        if (!run.rank) continue;
        run.first = std::max(run.first, token), run.last = std::min(run.last, token + tokens);
        std::fill(any + (run.first - token), any + (run.last - token), true);
        int64_t apart = alternate ? addend.adapters->parts : 1;  // columns side by side are read faster
        for (int64_t part = 0; part < apart; part++)
            for (int64_t i = first + part; i < last; i += apart)
                for_columns(*addend.adapters, i, alternate, [&](const Columns& columns) {
                    expand_run(addend, run, columns, values[run.first - token] + (i - panel) * PARTS);
                });
    }
}
