// A mixture of experts: the MLP of a layer in which a router chooses a few of many for each token. Mirrored in
// native/abi.py; the semantics are those of `route` and `fused_moe` in ops/moe.py.
#pragma once

#include "linear.h"

// How a token's experts are chosen, and what weighs them: `Routing` of ops/moe.py.
struct Choice {
    int64_t top_k;
    int64_t sigmoid;      // of logits are scores, and not likelihoods
    int64_t renormalise;  // whether the weights of a token's experts are made to add up to 1
    int64_t groups, top_groups, group_best;
    float scale;              // of weights
    const float* correction;  // [experts], which scores are compared with; null where there is none
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

// sums [tokens, hidden] += what the mixture makes of x [tokens, hidden]: first what a token's experts give, in the order
// of their numbers, then what the shared one does, so that neither other tokens nor threads change a sum.
void add_mixture(const Mixture& mixture, const float* x, int64_t tokens, float* sums);
