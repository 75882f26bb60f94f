// A mixture of experts: the MLP of a layer in which a router chooses a few of many for each token. Mirrored in
// native/abi.py; the semantics are those of `route` and `fused_moe` in ops/moe.py.
#pragma once

#include "linear.h"

struct Mixture {
    int64_t count, top_k;  // experts, and how many of them a token has
    int64_t renormalise;   // whether the weights of a token's experts are made to add up to 1
    int64_t gate;          // a `Gate`
    Linear router;         // [count, hidden]
    Linear shared_gate;    // [1, hidden]; without outputs where there is no shared expert
    // Of each expert, and then of the shared one, which every token has, weighed by a sigmoid. All of one format.
    const Linear* gate_up;  // panels alternate
    const Linear* down;
};

// sums [tokens, hidden] += what the mixture makes of x [tokens, hidden]: first what a token's experts give, in the order
// of their numbers, then what the shared one does, so that neither other tokens nor threads change a sum.
void add_mixture(const Mixture& mixture, const float* x, int64_t tokens, float* sums);
