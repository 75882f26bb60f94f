// A mixture of experts: the MLP of a layer in which a router chooses a few of many for each token. Mirrored in
// native/abi.py; the semantics are those of `route` and `fused_moe` in ops/moe.py.
#pragma once

#include "linear.h"

// Selection and weighting of a token's experts: `Routing` of ops/moe.py.
struct Choice {
    int64_t top_k;
    int64_t sigmoid;      // scores are sigmoids of logits, not a softmax
    int64_t renormalize;  // nonzero: normalize the weights of a token's experts to a sum of 1
    int64_t groups, top_groups, group_best;
    float scale;              // of weights
    const float* correction;  // [experts], added to scores for selection; or null
};

struct Mixture {
    int64_t count;       // experts
    int64_t gate;        // a `Gate`
    int64_t shared;      // whether there is a shared expert
    Choice choice;
    Linear router;       // [count, hidden]
    Linear shared_gate;  // [1, hidden]; without outputs where nothing weighs the shared expert
    // Of each expert, and then of the shared one, which every token has, weighed by a sigmoid if by anything. All of one
    // format.
    const Linear* gate_up;  // panels alternate
    const Linear* down;
};

// sums [tokens, hidden] += mixture(x [tokens, hidden]): first a token's experts in the order of their numbers, then the
// shared expert, so that neither other tokens nor threads change a sum.
void add_mixture(const Mixture& mixture, const float* x, int64_t tokens, float* sums);
