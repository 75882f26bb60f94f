// Top-k routing: the experts of each token, and the tokens of each expert.
#pragma once

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <limits>
#include <vector>

#include "mixture.h"
#include "vec.h"

// Softmax of logits [count] in place, then the `top_k` that are likeliest; of equal ones the first come first. Where
// they are no numbers, so are the weights, but experts are different ones all the same.
inline void choose_experts(float* logits, int64_t count, int64_t top_k, bool renormalize, int32_t* experts,
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
    for (int64_t place = 0; renormalize && place < top_k; place++) weights[place] /= chosen;
}

constexpr float OUT = -FLT_MAX;  // below every score

// Makes `left` [count] of experts of all groups but the best OUT; of equal groups the first are better. Needs `spare`
// [count].
inline void drop_groups(const Choice& how, float* left, float* spare, int64_t count) {
    int64_t size = count / how.groups;
    std::copy(left, left + count, spare);
    for (int64_t group = 0; group < how.groups; group++) {
        float worth = 0;
        for (int64_t n = 0; n < how.group_best; n++) {
            float* best = std::max_element(spare + group * size, spare + (group + 1) * size);
            worth += *best;
            *best = OUT;
        }
        spare[group] = worth;  // where only groups that are done with had theirs
    }
    for (int64_t n = how.top_groups; n < how.groups; n++) {
        int64_t worst = 0;
        for (int64_t group = 1; group < how.groups; group++)
            if (spare[group] <= spare[worst]) worst = group;
        std::fill_n(left + worst * size, size, OUT);
        spare[worst] = std::numeric_limits<float>::infinity();
    }
}

// Scores of logits [count] in place, then the `top_k` that are best once they are corrected; of equal ones the first come
// first. Experts are different ones whatever the logits are. Needs `memory` [2 * count].
inline void choose_scored(const Choice& how, float* scores, float* memory, int64_t count, int32_t* experts,
                          float* weights) {
    float most = *std::max_element(scores, scores + count), total = 0, chosen = 0, *left = memory;
    for (int64_t i = 0; i < count; i++) {
        scores[i] = how.sigmoid ? 1 / (1 + std::exp(-scores[i])) : std::exp(scores[i] - most);
        total += scores[i];
    }
    for (int64_t i = 0; i < count; i++) {
        if (!how.sigmoid) scores[i] /= total;
        left[i] = how.correction ? scores[i] + how.correction[i] : scores[i];
        if (left[i] < OUT) left[i] = OUT;
    }
    if (how.top_groups < how.groups) drop_groups(how, left, memory + count, count);
    constexpr float TAKEN = -std::numeric_limits<float>::infinity();
    for (int64_t place = 0; place < how.top_k; place++) {
        int64_t best = -1;
        for (int64_t i = 0; i < count; i++)
            if (left[i] != TAKEN && (best < 0 || left[i] > left[best])) best = i;
        experts[place] = int32_t(best);
        weights[place] = scores[best];
        chosen += weights[place];
        left[best] = TAKEN;
    }
    chosen += 1e-20f;
    for (int64_t place = 0; how.renormalize && place < how.top_k; place++) weights[place] /= chosen;
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
