#include "logits.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "pool.h"
#include "sampling.h"
#include "vec.h"

void penalize(float* logits, int64_t vocab, const int64_t* rows, const int64_t* sequences, int64_t count,
              const Occurrences& occurrences, const Penalties& penalties) {
    pool::run_pieces(count, 1, [&](int64_t from, int64_t to) {
        for (int64_t i = from; i < to; i++) {
            float* row = logits + rows[i] * vocab;
            const int32_t* output = occurrences.output + sequences[i] * vocab;
            const uint8_t* prompt = occurrences.prompt + sequences[i] * vocab;
            float repetition = penalties.repetition[i], frequency = penalties.frequency[i];
            float presence = penalties.presence[i];
            for (int64_t token = 0; token < vocab; token++) {
                float logit = row[token], times = float(output[token]);
                bool said = output[token] > 0, seen = said | (prompt[token] != 0);
                float repeated = logit > 0 ? logit / repetition : logit * repetition;
                logit = seen ? repeated : logit;
                row[token] = logit - frequency * times - presence * float(said);
            }
        }
    });
}

namespace {

struct Candidate {
    float logit;
    int64_t id;
};

bool likelier(const Candidate& a, const Candidate& b) {
    return a.logit > b.logit || (a.logit == b.logit && a.id < b.id);
}

// The sum of e^(logit - highest). Blocks are summed in float, and the sums of blocks in double.
double sum_exp(const float* row, int64_t n, float highest) {
    constexpr int64_t BLOCK = 1024;
    double total = 0;
    for (int64_t start = 0; start < n; start += BLOCK) {
        int64_t size = std::min(BLOCK, n - start);
        F32 sums = {};
        over(size, [&](int64_t i, auto get, auto) {
            F32 weight = exp(get(row + start + i) - highest);
            if (i + LANES > size) {  // the zeros past the end are not the row's
                I32 past = lanes() >= int32_t(size - i);
                weight = past ? F32{} : weight;
            }
            sums += weight;
        });
        for (int lane = 0; lane < LANES; lane++) total += double(sums[lane]);
    }
    return total;
}

// The `top` likeliest tokens in order. A heap holds the likeliest so far, the least likely of them first.
const std::vector<Candidate>& likeliest(const float* row, int64_t n, int64_t top) {
    static thread_local std::vector<Candidate> heap;
    heap.clear();
    for (int64_t token = 0; token < n; token++) {
        float logit = row[token] == row[token] ? row[token] : -INFINITY;
        if (int64_t(heap.size()) < top) {
            heap.push_back({logit, token});
            std::push_heap(heap.begin(), heap.end(), likelier);
        } else if (logit > heap.front().logit) {
            std::pop_heap(heap.begin(), heap.end(), likelier);
            heap.back() = {logit, token};
            std::push_heap(heap.begin(), heap.end(), likelier);
        }
    }
    std::sort_heap(heap.begin(), heap.end(), likelier);
    return heap;
}

}  // namespace

void token_logprobs(const float* logits, int64_t vocab, const int64_t* rows, const int64_t* tokens, int64_t count,
                    int64_t top, float* chosen, int64_t* top_ids, float* top_logprobs) {
    pool::run_pieces(count, 1, [&](int64_t from, int64_t to) {
        for (int64_t i = from; i < to; i++) {
            const float* row = logits + (rows ? rows[i] : i) * vocab;
            float highest;
            argmax_row(row, vocab, &highest);
            float total = highest + float(std::log(sum_exp(row, vocab, highest)));
            chosen[i] = row[tokens[i]] - total;
            if (!top) continue;
            const auto& best = likeliest(row, vocab, top);
            for (int64_t k = 0; k < top; k++) {
                top_ids[i * top + k] = best[size_t(k)].id;
                top_logprobs[i * top + k] = best[size_t(k)].logit - total;
            }
        }
    });
}
