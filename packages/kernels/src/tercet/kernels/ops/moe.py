"""A mixture of experts: every token goes through a few of many gated MLPs, and their results are weighed."""

import torch

from tercet.kernels.ops.activation import silu_and_mul


def route(router_logits: torch.Tensor, top_k: int, *, renormalise: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """(weights float32 [tokens, top_k], experts int64 [tokens, top_k]) of logits [tokens, experts].

    The weights are softmax probabilities; renormalised, those of a token add up to 1.
    """
    probabilities = router_logits.float().softmax(-1)
    weights, experts = probabilities.topk(top_k, -1)
    return (weights / weights.sum(-1, keepdim=True) if renormalise else weights), experts


def fused_moe(
    x: torch.Tensor, weights: torch.Tensor, experts: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor
) -> torch.Tensor:
    """Sum over a token's experts e of weight * down[e] @ silu_and_mul(gate_up[e] @ x), in x's dtype.

    x [tokens, hidden], weights and experts [tokens, top_k] as of `route`, gate_up [experts, 2 * size, hidden], down
    [experts, hidden, size]. Tokens are brought into the order of their experts, so that each expert that has any is one
    matrix product over all of them.
    """
    tokens, top_k = experts.shape
    order = experts.flatten().argsort(stable=True)
    rows = x[order // top_k]
    out = torch.empty_like(rows)
    first = 0
    for expert, count in enumerate(experts.flatten().bincount(minlength=len(gate_up)).tolist()):
        if count:
            mine = slice(first, first + count)
            out[mine] = silu_and_mul(rows[mine] @ gate_up[expert].T) @ down[expert].T
            first += count
    results = torch.empty_like(out).index_copy_(0, order, out).view(tokens, top_k, x.shape[1])
    return (results.float() * weights[..., None]).sum(1).to(x.dtype)
