// Tokens are sorted by expert, so that each expert with tokens computes one product.
// Experts come in waves: the products of all experts of a wave are one parallel loop, because a token or two are too
// little work to share out one expert at a time.
#include "mixture.h"

#include "buffer.h"
#include "gated.h"
#include "pool.h"
#include "routing.h"

namespace {

constexpr int64_t WAVE_ROWS = 512;  // of all experts of a wave; one that has more is a wave of its own

// Scratch memory of the mixtures of a step; one for each thread that runs models.
struct Workspace {
    Buffer routed, routed_scales, logits, scored, experts, weights, shared;
    Buffer inputs, input_scales, gathered, gathered_scales, out;
    GatedRows gated;
    Routing routing;
    std::vector<Product> products;
};

Workspace& workspace() {
    static thread_local Workspace workspace;
    return workspace;
}

// Rows of floats [rows, k] in a format.
Operand operand_from(int64_t format, const float* x, int64_t k, int64_t rows, Buffer& memory, Buffer& scales) {
    int64_t stride = operand_stride(format, k);
    Operand operand = {memory.bytes(stride * rows), stride, scales.floats(rows)};
    pool::for_rows(rows, k, [&](int64_t row) { fill_operand(format, x + row * k, k, operand, row); });
    return operand;
}

// Weight of the shared expert for each token, or null. `x` is in the format of routers.
float* weigh_shared(const Mixture& mixture, const Operand& x, int64_t tokens) {
    if (!mixture.shared) return nullptr;
    const Linear& gate = mixture.shared_gate;
    float* weights = workspace().shared.floats(tokens);
    if (!gate.n) {
        std::fill_n(weights, tokens, 1.0f);
        return weights;
    }
    multiply(gate, x, tokens, {Output::STORE, weights, 1});
    for (int64_t token = 0; token < tokens; token++) weights[token] = 1 / (1 + std::exp(-weights[token]));
    return weights;
}

void route(const Mixture& mixture, const Operand& x, int64_t tokens) {
    Workspace& space = workspace();
    const Choice& how = mixture.choice;
    int64_t count = mixture.count, top_k = how.top_k;
    bool scored = how.sigmoid || how.correction || how.top_groups < how.groups;
    float *logits = space.logits.floats(tokens * count), *weights = space.weights.floats(tokens * top_k);
    float* memory = scored ? space.scored.floats(tokens * 2 * count) : nullptr;
    auto* experts = reinterpret_cast<int32_t*>(space.experts.bytes(4 * tokens * top_k));
    multiply(mixture.router, x, tokens, {Output::STORE, logits, count});
    pool::for_rows(tokens, count * top_k, [&](int64_t token) {
        float *mine = logits + token * count, *weight = weights + token * top_k;
        int32_t* chosen = experts + token * top_k;
        if (scored)
            choose_scored(how, mine, memory + token * 2 * count, count, chosen, weight);
        else
            choose_experts(mine, count, top_k, how.renormalize, chosen, weight);
        for (int64_t place = 0; how.scale != 1 && place < top_k; place++) weight[place] *= how.scale;
    });
    space.routing.group(experts, weights, weigh_shared(mixture, x, tokens), tokens, top_k, count);
}

// Experts [first, last), and the rows of the routing that are theirs, [begin, end).
struct Wave {
    const Routing& routing;
    int64_t first, last, begin, end;

    Wave(const Routing& routing, int64_t first) : routing(routing), first(first), last(first + 1) {
        begin = routing.starts[size_t(first)];
        while (last < routing.experts() && routing.starts[size_t(last) + 1] - begin <= WAVE_ROWS) last++;
        end = routing.starts[size_t(last)];
    }

    int64_t rows() const { return end - begin; }

    // Calls body(expert, the first of its rows in the wave, how many it has) for those that have any.
    template <class Body>
    void for_experts(const Body& body) const {
        for (int64_t expert = first; expert < last; expert++)
            if (int64_t rows = routing.rows(expert)) body(expert, routing.starts[size_t(expert)] - begin, rows);
    }
};

// The rows of x that an expert of a wave has. Who has all of them, as in a decode of one, reads them where they are.
Operand inputs_of(const Wave& wave, int64_t first, int64_t rows, const Operand& x, int64_t tokens,
                  const Operand& gathered) {
    if (rows == tokens) return x;
    Operand mine = gathered.from(first);
    pool::for_rows(rows, x.stride, [&](int64_t row) {
        int64_t token = wave.routing.tokens[size_t(wave.begin + first + row)];
        std::memcpy(mine.rows + row * x.stride, x.rows + token * x.stride, size_t(x.stride));
        mine.scales[row] = x.scales[token];
    });
    return mine;
}

// The wave's rows through both halves of their experts: [rows, hidden].
const float* through_experts(const Mixture& mixture, const Wave& wave, const Operand& x, int64_t tokens) {
    Workspace& space = workspace();
    int64_t rows = wave.rows(), hidden = mixture.router.k, most = 0;
    wave.for_experts([&](int64_t expert, int64_t, int64_t) { most = std::max(most, mixture.down[expert].k); });
    Operand gathered = {space.gathered.bytes(rows * x.stride), x.stride, space.gathered_scales.floats(rows)};
    space.gated.begin(mixture.down[0].format, most, rows);
    space.products.clear();
    wave.for_experts([&](int64_t expert, int64_t first, int64_t count) {
        Output gated = space.gated.output(first, count, mixture.down[expert].k, mixture.gate);
        Operand inputs = inputs_of(wave, first, count, x, tokens, gathered);
        space.products.push_back({&mixture.gate_up[expert], inputs, count, gated});
    });
    multiply(space.products.data(), int64_t(space.products.size()));
    Operand gated = space.gated.finish();
    float* out = space.out.floats(rows * hidden);
    space.products.clear();
    wave.for_experts([&](int64_t expert, int64_t first, int64_t count) {
        Output stored = {Output::STORE, out + first * hidden, hidden};
        space.products.push_back({&mixture.down[expert], gated.from(first), count, stored});
    });
    multiply(space.products.data(), int64_t(space.products.size()));
    return out;
}

// Adds the weighed rows of a wave to those of their tokens. A token may have several, so threads share out columns.
void add_up(const Wave& wave, const float* rows, int64_t hidden, float* sums) {
    int64_t vectors = (hidden + LANES - 1) / LANES, work = wave.rows() * LANES;
    pool::run_pieces(vectors, (pool::GRAIN + work - 1) / work, [&](int64_t from, int64_t to) {
        int64_t column = from * LANES, width = std::min(to * LANES, hidden) - column;
        for (int64_t row = 0; row < wave.rows(); row++) {
            size_t pair = size_t(wave.begin + row);
            const float* x = rows + row * hidden + column;
            float *sum = sums + wave.routing.tokens[pair] * hidden + column, weight = wave.routing.weights[pair];
            over(width, [&](int64_t i, auto get, auto put) { put(sum + i, get(x + i) * weight + get(sum + i)); });
        }
    });
}

}  // namespace

void add_mixture(const Mixture& mixture, const float* x, int64_t tokens, float* sums) {
    Workspace& space = workspace();
    int64_t hidden = mixture.router.k, format = mixture.gate_up[0].format;
    Operand routed = operand_from(mixture.router.format, x, hidden, tokens, space.routed, space.routed_scales);
    route(mixture, routed, tokens);
    Operand inputs = format == mixture.router.format
                         ? routed
                         : operand_from(format, x, hidden, tokens, space.inputs, space.input_scales);
    for (int64_t expert = 0; expert < space.routing.experts();) {
        Wave wave(space.routing, expert);
        expert = wave.last;
        if (wave.rows()) add_up(wave, through_experts(mixture, wave, inputs, tokens), hidden, sums);
    }
}
