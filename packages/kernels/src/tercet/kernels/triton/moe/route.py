"""Top-k routing of a mixture of experts in one kernel. The reference is `tercet.kernels.ops.moe.route`.

Plain softmax routing has a kernel of its own, which compares logits.
"""

import torch
import triton
import triton.language as tl

from tercet.kernels.ops.moe import LEAST, Routing
from tercet.kernels.triton.launch import pdl_launch_next, pdl_options, pdl_wait, power_of_two
from tercet.kernels.triton.launch_cache import launch


@triton.jit
def route_kernel(
    logits_ptr,  # [tokens, experts]
    weights_ptr,  # float32 [tokens, TOP_K]
    chosen_ptr,  # int64 [tokens, TOP_K]
    experts,
    scale,
    TOP_K: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    RANKS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Select the experts of one token, best first. Indices are valid for any logits."""
    token = tl.program_id(0).to(tl.int64)
    expert, rank = tl.arange(0, BLOCK), tl.arange(0, RANKS)
    pdl_wait(PDL)
    left = tl.load(logits_ptr + token * experts + expert, mask=expert < experts, other=-float("inf")).to(tl.float32)
    pdl_launch_next(PDL)
    highest = tl.max(left, 0)
    total = tl.sum(tl.exp(left - highest), 0)
    weights = tl.zeros([RANKS], tl.float32)
    chosen = tl.zeros([RANKS], tl.int64)
    for place in tl.static_range(TOP_K):
        best = tl.minimum(tl.argmax(left, 0), experts - 1)
        weights = tl.where(rank == place, tl.exp(tl.max(left, 0) - highest), weights)
        chosen = tl.where(rank == place, best.to(tl.int64), chosen)
        left = tl.where(expert == best, -float("inf"), left)
    if RENORMALIZE:
        total = tl.sum(weights, 0)
    at = token * TOP_K + rank
    tl.store(weights_ptr + at, weights / total * scale, mask=rank < TOP_K)
    tl.store(chosen_ptr + at, chosen, mask=rank < TOP_K)


@triton.jit
def _of_best_groups(
    left,  # float32 [groups, experts of each]
    group,  # [groups]
    place,  # [1, experts of each]
    TOP_GROUPS: tl.constexpr,
    GROUP_BEST: tl.constexpr,
):
    """Mask the scores outside the best groups."""
    worth = tl.zeros([left.shape[0]], tl.float32)
    uncounted = left
    for _ in tl.static_range(GROUP_BEST):
        best = tl.max(uncounted, 1)
        worth += best
        first = tl.min(tl.where(uncounted == best[:, None], place, left.shape[1]), 1)
        uncounted = tl.where(place == first[:, None], -float("inf"), uncounted)
    kept = group < 0
    for _ in tl.static_range(TOP_GROUPS):
        best_group = tl.argmax(worth, 0)
        kept = kept | (group == best_group)
        worth = tl.where(group == best_group, -float("inf"), worth)
    return tl.where(kept[:, None], left, -float("inf"))


@triton.jit
def route_scored_kernel(
    logits_ptr,  # [tokens, experts]
    correction_ptr,  # float32 [experts], if CORRECTED
    weights_ptr,  # float32 [tokens, TOP_K]
    chosen_ptr,  # int64 [tokens, TOP_K]
    experts,
    scale,
    least,
    TOP_K: tl.constexpr,
    GROUPS: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    GROUP_BEST: tl.constexpr,
    SIGMOID: tl.constexpr,
    CORRECTED: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    RANKS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Select experts by comparing scores; a row of the block is a group."""
    token = tl.program_id(0).to(tl.int64)
    group, rank, place = tl.arange(0, ROWS), tl.arange(0, RANKS), tl.arange(0, BLOCK)[None, :]
    size = experts // GROUPS
    held = (group[:, None] < GROUPS) & (place < size)
    expert = group[:, None] * size + place
    pdl_wait(PDL)
    logits = tl.load(logits_ptr + token * experts + expert, mask=held, other=-float("inf")).to(tl.float32)
    pdl_launch_next(PDL)
    if SIGMOID:
        scores = 1 / (1 + tl.exp(-logits))
    else:
        likely = tl.exp(logits - tl.max(logits))
        scores = likely / tl.sum(likely)
    left = scores
    if CORRECTED:
        left += tl.load(correction_ptr + expert, mask=held, other=0.0)
    left = tl.where(held & (left > -float("inf")), left, -float("inf"))  # NaN is never the largest
    if TOP_GROUPS < GROUPS:
        left = _of_best_groups(left, group, place, TOP_GROUPS, GROUP_BEST)
    weights = tl.zeros([RANKS], tl.float32)
    chosen = tl.zeros([RANKS], tl.int64)
    for taken in tl.static_range(TOP_K):
        one = tl.minimum(tl.min(tl.where(left == tl.max(left), expert, experts)), experts - 1)
        weights = tl.where(rank == taken, tl.sum(tl.where((expert == one) & held, scores, 0.0)), weights)
        chosen = tl.where(rank == taken, one.to(tl.int64), chosen)
        left = tl.where(expert == one, -float("inf"), left)
    if RENORMALIZE:
        weights = weights / (tl.sum(weights, 0) + least)
    at = token * TOP_K + rank
    tl.store(weights_ptr + at, weights * scale, mask=rank < TOP_K)
    tl.store(chosen_ptr + at, chosen, mask=rank < TOP_K)


def route(
    router_logits: torch.Tensor, routing: Routing, correction: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Select experts as in the reference; the first experts and groups win ties."""
    logits, top_k = router_logits.contiguous(), routing.top_k
    tokens, experts = logits.shape
    weights = torch.empty(tokens, top_k, dtype=torch.float32, device=logits.device)
    chosen = torch.empty(tokens, top_k, dtype=torch.int64, device=logits.device)
    how = {"TOP_K": top_k, "RENORMALIZE": routing.renormalize, "RANKS": power_of_two(top_k), "num_warps": 1}
    pdl = pdl_options(logits.device)
    if routing.score == "softmax" and correction is None and not routing.limited:
        given, numbers = (logits, weights, chosen), (experts, routing.scale)
        launch(route_kernel, (tokens,), given, numbers, BLOCK=power_of_two(experts), **how, **pdl)
        return weights, chosen
    groups = routing.groups if routing.limited else 1
    launch(
        route_scored_kernel,
        (tokens,),
        (logits, logits if correction is None else correction, weights, chosen),
        (experts, routing.scale, LEAST),
        GROUPS=groups,
        TOP_GROUPS=routing.top_groups if routing.limited else 1,
        GROUP_BEST=routing.group_best,
        SIGMOID=routing.score == "sigmoid",
        CORRECTED=correction is not None,
        ROWS=power_of_two(groups),
        BLOCK=power_of_two(experts // groups),
        **how,
        **pdl,
    )
    return weights, chosen
