#include "recurrent.h"

#include <cstring>
#include <vector>

#include "pool.h"
#include "vec.h"

namespace {

constexpr int BLOCK = 4;  // vectors of columns whose sums stay in registers

struct DeltaToken {
    const float *q, *k, *v, *factor;
    int64_t step;  // from a row's factor to the next one's: 1, or 0 if all rows have the same
    float beta;
    float* out;
};

// The first COUNT * LANES of n columns of a state with rows `stride` elements apart.
template <int COUNT>
void delta_columns(const DeltaToken& token, int64_t rows, int64_t n, float* state, int64_t stride) {
    auto part = [&](int i) { return n - i * LANES < LANES ? n - i * LANES : LANES; };
    F32 delta[COUNT] = {}, out[COUNT] = {};
    for (int64_t row = 0; row < rows; row++) {
        float decayed = token.factor[row * token.step] * token.k[row];
        for (int i = 0; i < COUNT; i++) delta[i] += decayed * load_first(state + row * stride + i * LANES, part(i));
    }
    for (int i = 0; i < COUNT; i++) delta[i] = token.beta * (load_first(token.v + i * LANES, part(i)) - delta[i]);
    for (int64_t row = 0; row < rows; row++) {
        float factor = token.factor[row * token.step];
        for (int i = 0; i < COUNT; i++) {
            float* at = state + row * stride + i * LANES;
            F32 next = factor * load_first(at, part(i)) + token.k[row] * delta[i];
            store_first(at, next, part(i));
            out[i] += token.q[row] * next;
        }
    }
    for (int i = 0; i < COUNT; i++) store_first(token.out + i * LANES, out[i], part(i));
}

void delta_token(const DeltaToken& token, int64_t rows, int64_t columns, float* state) {
    int64_t first = 0;
    auto from = [&] {
        DeltaToken at = token;
        at.v += first;
        at.out += first;
        return at;
    };
    for (; first + BLOCK * LANES <= columns; first += BLOCK * LANES)
        delta_columns<BLOCK>(from(), rows, BLOCK * LANES, state + first, columns);
    for (; first < columns; first += LANES) delta_columns<1>(from(), rows, columns - first, state + first, columns);
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

// step(token, head, state) for all tokens of each state and head, in order; a snapshot after each segment that has one.
template <class Step>
void for_segments(const Recurrence& recurrence, const Segment* segments, int64_t count, const Step& step) {
    int64_t heads = recurrence.heads, size = recurrence.rows * recurrence.columns;
    std::vector<int64_t> first;  // segment of each state
    for (int64_t i = 0; i < count; i++)
        if (i == 0 || segments[i].state != segments[i - 1].state) first.push_back(i);
    first.push_back(count);
    pool::run(int64_t(first.size() - 1) * heads, [&](int64_t task) {
        int64_t head = task % heads, sequence = task / heads;
        for (int64_t i = first[sequence]; i < first[sequence + 1]; i++) {
            const Segment& segment = segments[i];
            float* state = recurrence.states + (segment.state * heads + head) * size;
            for (int64_t token = segment.begin; token < segment.end; token++) step(token, head, state);
            if (segment.snapshot < 0) continue;
            float* snapshot = recurrence.states + (segment.snapshot * heads + head) * size;
            std::memcpy(snapshot, state, size_t(size) * sizeof *state);
        }
    });
}

}  // namespace

void delta_rule(const Recurrence& recurrence, const Segment* segments, int64_t count, const float* q, const float* k,
                const float* v, const float* beta) {
    int64_t heads = recurrence.heads, share = heads / recurrence.groups;
    for_segments(recurrence, segments, count, [&](int64_t token, int64_t head, float* state) {
        int64_t at = token * heads + head;
        int64_t key = (token * recurrence.groups + head / share) * recurrence.rows, value = at * recurrence.columns;
        const float* factor = recurrence.factor + at * recurrence.factors;
        delta_token({q + key, k + key, v + value, factor, recurrence.factors > 1, beta[at], recurrence.out + value},
                    recurrence.rows, recurrence.columns, state);
    });
}

void state_space_scan(const Recurrence& recurrence, const Segment* segments, int64_t count, const float* c,
                      const float* b, const float* x) {
    int64_t heads = recurrence.heads, share = heads / recurrence.groups;
    for_segments(recurrence, segments, count, [&](int64_t token, int64_t head, float* state) {
        int64_t at = token * heads + head;
        int64_t key = (token * recurrence.groups + head / share) * recurrence.columns, value = at * recurrence.rows;
        scan_token(recurrence.factor[at], c + key, b + key, x + value, recurrence.rows, recurrence.columns, state,
                   recurrence.out + value);
    });
}

void selective_scan(const Recurrence& recurrence, const Segment* segments, int64_t count, const float* c,
                    const float* b, const float* x, const float* step) {
    int64_t rows = recurrence.rows, columns = recurrence.columns;
    for_segments(recurrence, segments, count, [&](int64_t token, int64_t head, float* state) {
        int64_t first = (token * recurrence.heads + head) * rows;
        for (int64_t row = 0; row < rows; row++) {
            float time = step[first + row], added = time * x[first + row];
            const float* rate = recurrence.factor + (head * rows + row) * columns;
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
