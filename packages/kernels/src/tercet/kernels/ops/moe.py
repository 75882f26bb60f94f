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
    [experts, hidden, size].
    """
    out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for expert in range(len(gate_up)):
        token, choice = (experts == expert).nonzero(as_tuple=True)
        result = silu_and_mul(x[token] @ gate_up[expert].T) @ down[expert].T
        out.index_add_(0, token, result.float() * weights[token, choice, None])
    return out.to(x.dtype)
