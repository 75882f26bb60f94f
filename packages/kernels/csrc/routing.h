// Which experts a step's tokens have, and which tokens its experts have.
#pragma once

#include <algorithm>
#include <cmath>
#include <vector>

#include "vec.h"

// Softmax of logits [count] in place, then the `top_k` that are likeliest; of equal ones the first come first. Where
// they are no numbers, so are the weights, but experts are different ones all the same.
inline void choose_experts(float* logits, int64_t count, int64_t top_k, bool renormalise, int32_t* experts,
                           float* weights) {
    float most = *std::max_element(logits, logits + count), total = 0, chosen = 0;
    over(count, [&](int64_t i, auto get, auto put) { put(logits + i, exp(get(logits + i) - most)); });
    for (int64_t i = 0; i < count; i++) total += logits[i];
    constexpr float TAKEN = -1;
    for (int64_t place = 0; place < top_k; place++) {
        int64_t best = -1;
        for (int64_t i = 0; i < count; i++)
            if (logits[i] != TAKEN && (best < 0 || logits[i] > logits[best])) best = i;
        experts[place] = int32_t(best);
        weights[place] = logits[best] / total;
        chosen += weights[place];
        logits[best] = TAKEN;
    }
    for (int64_t place = 0; renormalise && place < top_k; place++) weights[place] /= chosen;
}

// The tokens of each expert, in their order, and what each of them weighs there. A thread that runs models keeps one.
struct Routing {
    std::vector<int64_t> starts;  // [experts + 1], of each expert in what follows
    std::vector<int64_t> tokens;
    std::vector<float> weights;

    int64_t experts() const { return int64_t(starts.size()) - 1; }
    int64_t rows(int64_t expert) const { return starts[size_t(expert) + 1] - starts[size_t(expert)]; }

    // From the experts and weights [count, top_k] of each token. With a `shared` weight for each there is one more expert,
    // which has all of them.
    void group(const int32_t* experts, const float* each, const float* shared, int64_t count, int64_t top_k,
               int64_t expert_count) {
        int64_t pairs = count * top_k;
        starts.assign(size_t(expert_count) + 1, 0);
        tokens.resize(size_t(pairs + (shared ? count : 0)));
        weights.resize(tokens.size());
        for (int64_t pair = 0; pair < pairs; pair++) starts[size_t(experts[pair]) + 1]++;
        for (size_t expert = 1; expert < starts.size(); expert++) starts[expert] += starts[expert - 1];
        std::vector<int64_t> next(starts.begin(), starts.end() - 1);
        for (int64_t pair = 0; pair < pairs; pair++) put(next[size_t(experts[pair])]++, pair / top_k, each[pair]);
        if (!shared) return;
        for (int64_t token = 0; token < count; token++) put(pairs + token, token, shared[token]);
        starts.push_back(pairs + count);
    }

  private:
    void put(int64_t place, int64_t token, float weight) {
        tokens[size_t(place)] = token;
        weights[size_t(place)] = weight;
    }
};
