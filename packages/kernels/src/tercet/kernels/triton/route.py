"""Which experts a token goes through, in one kernel. The reference is `tercet.kernels.ops.moe.route`."""

import torch
import triton
import triton.language as tl

from tercet.kernels.triton.launch import await_previous, early_start, power_of_two, release_next


@triton.jit
def route_kernel(
    logits_ptr,  # [tokens, experts]
    weights_ptr,  # float32 [tokens, TOP_K]
    chosen_ptr,  # int64 [tokens, TOP_K]
    experts,
    TOP_K: tl.constexpr,
    RENORMALISE: tl.constexpr,
    BLOCK: tl.constexpr,
    RANKS: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Of one token, the best expert after the other. Whatever the logits are, the experts are some that there are."""
    token = tl.program_id(0).to(tl.int64)
    expert, rank = tl.arange(0, BLOCK), tl.arange(0, RANKS)
    await_previous(EARLY)
    left = tl.load(logits_ptr + token * experts + expert, mask=expert < experts, other=-float("inf")).to(tl.float32)
    release_next(EARLY)
    highest = tl.max(left, 0)
    total = tl.sum(tl.exp(left - highest), 0)
    weights = tl.zeros([RANKS], tl.float32)
    chosen = tl.zeros([RANKS], tl.int64)
    for place in tl.static_range(TOP_K):
        best = tl.minimum(tl.argmax(left, 0), experts - 1)
        weights = tl.where(rank == place, tl.exp(tl.max(left, 0) - highest), weights)
        chosen = tl.where(rank == place, best.to(tl.int64), chosen)
        left = tl.where(expert == best, -float("inf"), left)
    if RENORMALISE:
        total = tl.sum(weights, 0)
    at = token * TOP_K + rank
    tl.store(weights_ptr + at, weights / total, mask=rank < TOP_K)
    tl.store(chosen_ptr + at, chosen, mask=rank < TOP_K)


def route(router_logits: torch.Tensor, top_k: int, *, renormalise: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """As the reference; of equal logits the first expert's go first."""
    logits = router_logits.contiguous()
    tokens, experts = logits.shape
    weights = torch.empty(tokens, top_k, dtype=torch.float32, device=logits.device)
    chosen = torch.empty(tokens, top_k, dtype=torch.int64, device=logits.device)
    route_kernel[(tokens,)](
        logits,
        weights,
        chosen,
        experts,
        TOP_K=top_k,
        RENORMALISE=renormalise,
        BLOCK=power_of_two(experts),
        RANKS=power_of_two(top_k),
        num_warps=1,
        **early_start(logits.device),
    )
    return weights, chosen
