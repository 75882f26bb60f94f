// Penalties and log-probabilities: see ops/penalties.py and ops/logprobs.py.
#pragma once

#include <cstdint>

// Occurrences of tokens in the output of sequences [sequences, vocab], and whether they are in the prompt.
struct Occurrences {
    const int32_t* output;
    const uint8_t* prompt;
};

// Strengths for each of some rows.
struct Penalties {
    const float* repetition;
    const float* frequency;
    const float* presence;
};

// Penalizes rows[i] of logits [, vocab], in place, for the tokens of sequences[i].
void penalize(float* logits, int64_t vocab, const int64_t* rows, const int64_t* sequences, int64_t count,
              const Occurrences& occurrences, const Penalties& penalties);

// For each i, the log-probability of tokens[i] in rows[i] of logits [, vocab], and the `top` likeliest tokens [, top]
// in order with theirs, equally likely ones by id. Without `rows`, row i. The largest logit of a row is finite.
void token_logprobs(const float* logits, int64_t vocab, const int64_t* rows, const int64_t* tokens, int64_t count,
                    int64_t top, float* chosen, int64_t* top_ids, float* top_logprobs);
