#include "recurrent.h"

#include <cmath>
#include <cstring>
#include <utility>
#include <vector>

#include "linear.h"
#include "vec.h"

namespace {

constexpr int BLOCK = LANES == 16 ? 4 : 2;  // vectors of columns whose sums stay in registers

inline float factor_of(float decay) { return exp(broadcast(decay))[0]; }

// Vectors of columns of a row: all of them whole, or one of `part` elements.
template <int COUNT, bool WHOLE>
struct Columns {
    int64_t part;

    template <class T>
    F32 get(const T* row, int i) const {
        if constexpr (WHOLE) return load(row + i * LANES);
        return load_some(row, part);
    }

    void put(float* row, int i, F32 x) const {
        if constexpr (WHOLE)
            store(row + i * LANES, x);
        else
            store_some(row, x, part);
    }

    int64_t count() const { return WHOLE ? COUNT * LANES : part; }
};

// One token as the rows of a head's state need it.
class DeltaToken {
  public:
    explicit DeltaToken(int64_t rows) : memory_(size_t(4 * rows)), rows_(rows) {}

    template <class T>
    void read(const Recurrence& recurrence, const DeltaRows& tokens, int64_t token, int64_t head) {
        int64_t rows = rows_, at = token * recurrence.heads + head;
        int64_t key = head / (recurrence.heads / recurrence.groups) * rows;
        normalize(static_cast<const T*>(tokens.q) + token * tokens.q_stride + key, 1 / std::sqrt(float(rows)), query());
        normalize(static_cast<const T*>(tokens.k) + token * tokens.k_stride + key, 1, this->key());
        const float* decay = recurrence.decay + at * recurrence.decays;
        float* factors = factor();
        if (recurrence.decays == 1) {
            float one = factor_of(*decay);
            over(rows, [&](int64_t i, auto, auto put) { put(factors + i, broadcast(one)); });
        } else {
            over(rows, [&](int64_t i, auto get, auto put) { put(factors + i, exp(get(decay + i))); });
        }
        over(rows, [&](int64_t i, auto get, auto put) {
            put(decayed() + i, get(factors + i) * get(this->key() + i));
        });
        beta = tokens.beta[at];
    }

    float* query() { return memory_.data(); }
    float* key() { return memory_.data() + rows_; }
    float* factor() { return memory_.data() + 2 * rows_; }
    float* decayed() { return memory_.data() + 3 * rows_; }  // key times factor

    float beta = 0;

  private:
    template <class T>
    void normalize(const T* x, float scale, float* out) const {
        F32 squares = {};
        over(rows_, [&](int64_t i, auto get, auto) {
            F32 value = get(x + i);
            squares = value * value + squares;
        });
        scale /= std::sqrt(sum(squares) + 1e-6f);
        over(rows_, [&](int64_t i, auto get, auto put) { put(out + i, get(x + i) * scale); });
    }

    std::vector<float> memory_;
    int64_t rows_;
};

// Advances columns of a head's state by the tokens of a sequence. Each token reads the state once: while it is written,
// the sums that the next token's correction needs are made of it.
template <class T, int COUNT, bool WHOLE>
void delta_columns(const Recurrence& recurrence, const DeltaRows& tokens, const Segment* first, const Segment* last,
                   int64_t head, int64_t column, Columns<COUNT, WHOLE> columns) {
    int64_t rows = recurrence.rows, stride = recurrence.columns, heads = recurrence.heads;
    float* state = recurrence.states + (first->state * heads + head) * rows * stride + column;
    DeltaToken token(rows), next(rows);
    F32 predicted[COUNT] = {};  // the decayed key times the state
    auto found = [&](const Segment* segment, int64_t from) {  // the first token from there on; -1 for none
        for (; segment < last; segment++, from = segment < last ? segment->begin : 0)
            if (from < segment->end) return from;
        return int64_t(-1);
    };
    int64_t at = found(first, first->begin);
    if (at >= 0) {
        next.read<T>(recurrence, tokens, at, head);
        for (int64_t row = 0; row < rows; row++)
            UNROLLED
            for (int i = 0; i < COUNT; i++)
                predicted[i] += next.decayed()[row] * columns.get(state + row * stride, i);
    }
    for (const Segment* segment = first; segment < last; segment++) {
        for (int64_t number = segment->begin; number < segment->end; number++) {
            std::swap(token, next);
            int64_t later = found(segment, number + 1);
            if (later >= 0) next.read<T>(recurrence, tokens, later, head);
            const T* v = static_cast<const T*>(tokens.v) + number * tokens.v_stride + head * stride + column;
            F32 delta[COUNT], out[COUNT] = {};
            for (int i = 0; i < COUNT; i++) {
                delta[i] = token.beta * (columns.get(v, i) - predicted[i]);
                predicted[i] = F32{};
            }
            const float *query = token.query(), *key = token.key(), *factor = token.factor(), *decayed = next.decayed();
            for (int64_t row = 0; row < rows; row++) {
                float* here = state + row * stride;
                UNROLLED
                for (int i = 0; i < COUNT; i++) {
                    F32 value = factor[row] * columns.get(here, i) + key[row] * delta[i];
                    columns.put(here, i, value);
                    out[i] += query[row] * value;
                    predicted[i] += decayed[row] * value;
                }
            }
            float* to = recurrence.out + (number * heads + head) * stride + column;
            for (int i = 0; i < COUNT; i++) columns.put(to, i, out[i]);
        }
        if (segment->snapshot < 0) continue;
        float* snapshot = recurrence.states + (segment->snapshot * heads + head) * rows * stride + column;
        for (int64_t row = 0; row < rows; row++)
            std::memcpy(snapshot + row * stride, state + row * stride, size_t(columns.count()) * sizeof *state);
    }
}

template <class T>
void delta_rule_of(const Recurrence& recurrence, const DeltaRows& tokens, const Segment* segments, int64_t count) {
    constexpr int64_t WIDTH = BLOCK * LANES;
    int64_t columns = recurrence.columns, whole = columns / WIDTH, rest = columns % WIDTH;
    int64_t blocks = whole + (rest + LANES - 1) / LANES;
    for_sequences(segments, count, recurrence.heads * blocks, recurrence.rows * columns / blocks,
                  [&](const Segment* first, const Segment* last, int64_t part) {
                      int64_t head = part / blocks, block = part % blocks;
                      auto advance = [&](int64_t column, auto some) {
                          delta_columns<T>(recurrence, tokens, first, last, head, column, some);
                      };
                      if (block < whole) return advance(block * WIDTH, Columns<BLOCK, true>{LANES});
                      int64_t column = whole * WIDTH + (block - whole) * LANES;
                      if (columns - column >= LANES) return advance(column, Columns<1, true>{LANES});
                      advance(column, Columns<1, false>{columns - column});
                  });
}

void scan_token(float factor, const float* c, const float* b, const float* x, int64_t rows, int64_t columns,
                float* state, float* out) {
    for (int64_t row = 0; row < rows; row++) {
        F32 total{};
        float* at = state + row * columns;
        over(columns, [&](int64_t i, auto get, auto put) {
            F32 next = factor * get(at + i) + x[row] * get(b + i);
            put(at + i, next);
            total += next * get(c + i);
        });
        out[row] = sum(total);
    }
}

// Calls step(token, head, state) for the tokens of each sequence in their order, and copies states to snapshots.
template <class Step>
void for_tokens(const Recurrence& recurrence, const Segment* segments, int64_t count, const Step& step) {
    int64_t heads = recurrence.heads, size = recurrence.rows * recurrence.columns;
    auto advance = [&](const Segment* first, const Segment* last, int64_t head) {
        float* state = recurrence.states + (first->state * heads + head) * size;
        for (const Segment* segment = first; segment < last; segment++) {
            for (int64_t token = segment->begin; token < segment->end; token++) step(token, head, state);
            if (segment->snapshot < 0) continue;
            float* snapshot = recurrence.states + (segment->snapshot * heads + head) * size;
            std::memcpy(snapshot, state, size_t(size) * sizeof *state);
        }
    };
    for_sequences(segments, count, heads, size, advance);
}

}  // namespace

void delta_rule(const Recurrence& recurrence, const DeltaRows& tokens, const Segment* segments, int64_t count) {
    if (tokens.format == FLOAT32)
        delta_rule_of<float>(recurrence, tokens, segments, count);
    else
        delta_rule_of<Bf16>(recurrence, tokens, segments, count);
}

void state_space_scan(const Recurrence& recurrence, const Segment* segments, int64_t count, const float* c,
                      const float* b, const float* x) {
    int64_t heads = recurrence.heads, share = heads / recurrence.groups;
    int64_t rows = recurrence.rows, columns = recurrence.columns;
    for_tokens(recurrence, segments, count, [&](int64_t token, int64_t head, float* state) {
        int64_t at = token * heads + head, key = (token * recurrence.groups + head / share) * columns;
        scan_token(factor_of(recurrence.decay[at]), c + key, b + key, x + at * rows, rows, columns, state,
                   recurrence.out + at * rows);
    });
}

void selective_scan(const Recurrence& recurrence, const Segment* segments, int64_t count, const float* c,
                    const float* b, const float* x, const float* step) {
    int64_t rows = recurrence.rows, columns = recurrence.columns;
    for_tokens(recurrence, segments, count, [&](int64_t token, int64_t head, float* state) {
        int64_t first = (token * recurrence.heads + head) * rows;
        for (int64_t row = 0; row < rows; row++) {
            float time = step[first + row], added = time * x[first + row];
            const float* rate = recurrence.decay + (head * rows + row) * columns;
            float* at = state + row * columns;
            F32 total{};
            over(columns, [&](int64_t i, auto get, auto put) {
                F32 next = exp(time * get(rate + i)) * get(at + i) + added * get(b + token * columns + i);
                put(at + i, next);
                total += next * get(c + token * columns + i);
            });
            recurrence.out[first + row] = sum(total);
        }
    });
}
