"""Mixture of experts: each token passes through a few of many MLPs, whose results are weighted and summed."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812

from tercet.kernels.ops.activation import Gate, act_and_mul, squared_relu
from tercet.kernels.ops.quantized import QuantizedWeight, linear_quantized


@dataclass(frozen=True, eq=False)
class QuantizedExperts:
    """Quantized weights [count, n, k] of experts, stored as one weight [count * n, k] in the order of experts.

    Raises ValueError if a block of rows would span two experts.
    """

    weight: QuantizedWeight
    count: int

    def __post_init__(self) -> None:
        rows, block = self.weight.shape[0], self.weight.block[0]
        if rows % (self.count * block):
            raise ValueError(f"{rows} rows in blocks of {block} are no {self.count} experts")

    @property
    def shape(self) -> tuple[int, int, int]:
        """(count, n, k)."""
        rows, k = self.weight.shape
        return self.count, rows // self.count, k

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, expert: int) -> QuantizedWeight:
        """Return the weight [n, k] of one expert."""
        return self.some(range(expert, expert + 1))

    def some(self, experts: range) -> QuantizedWeight:
        """Return the weight [experts * n, k] of consecutive experts."""
        weight, n = self.weight, self.shape[1]
        rows = slice(experts.start * n, experts.stop * n)
        scaled = slice(rows.start // weight.block[0], rows.stop // weight.block[0])
        return replace(
            weight,
            codes=weight.codes[rows],
            scales=weight.scales[scaled],
            zeros=None if weight.zeros is None else weight.zeros[scaled],
            minimums=None if weight.minimums is None else weight.minimums[scaled],
        )


ExpertWeights = torch.Tensor | QuantizedExperts
"""One projection of all experts: [experts, outputs, inputs]."""


class ExpertBiases(NamedTuple):
    """Biases of the projections of experts."""

    gate_up: torch.Tensor  # [experts, 2 * size]
    down: torch.Tensor  # [experts, hidden]


Score = Literal["softmax", "sigmoid"]
"""Function that turns router logits into scores."""
LEAST = 1e-20
"""Added to the sum that weights are divided by, so that weights of 0 stay 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Routing:
    """Selection and weighting of a token's experts."""

    top_k: int
    score: Score = "softmax"
    renormalize: bool = False
    """Normalize the weights of a token's experts to a sum of 1, before they are scaled."""
    scale: float = 1.0
    """Factor of the weights."""
    groups: int = 1
    """Number of groups of consecutive experts, all of one size."""
    top_groups: int = 1
    """Number of groups with the highest group scores; a token's experts come from these."""
    group_best: int = 1
    """Number of best scores that a group's score sums up."""

    @property
    def limited(self) -> bool:
        """True if groups restrict the experts that a token can have."""
        return self.top_groups < self.groups


def route(
    router_logits: torch.Tensor, routing: Routing, correction: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Select experts: (weights float32 [tokens, top_k], experts int64 [tokens, top_k]) of logits [tokens, experts].

    Experts and groups are selected by score plus `correction` float32 [experts], if given; the weights are computed
    from the scores alone.
    """
    logits = router_logits.float()
    scores = logits.softmax(-1) if routing.score == "softmax" else logits.sigmoid()
    chosen_by = scores if correction is None else scores + correction
    if routing.limited:
        chosen_by = _of_best_groups(chosen_by, routing)
    experts = chosen_by.topk(routing.top_k, -1).indices
    weights = scores.gather(-1, experts)
    if routing.renormalize:
        weights = weights / (weights.sum(-1, keepdim=True) + LEAST)
    return weights * routing.scale, experts


def _of_best_groups(scores: torch.Tensor, routing: Routing) -> torch.Tensor:
    """Return scores [tokens, experts] with -inf for experts outside the best groups."""
    tokens, experts = scores.shape
    grouped = scores.view(tokens, routing.groups, experts // routing.groups)
    worth = grouped.topk(routing.group_best, -1).values.sum(-1)
    out = torch.ones_like(worth, dtype=torch.bool).scatter_(1, worth.topk(routing.top_groups, -1).indices, value=False)
    return grouped.masked_fill(out[..., None], -torch.inf).view(tokens, experts)


def fused_moe(
    x: torch.Tensor,
    weights: torch.Tensor,
    experts: torch.Tensor,
    gate_up: ExpertWeights,
    down: ExpertWeights,
    *,
    gate: Gate | None = "silu",
    biases: ExpertBiases | None = None,
) -> torch.Tensor:
    """Sum weight * down[e] @ act_and_mul(gate_up[e] @ x, gate) over the experts e of each token, in x's dtype.

    x [tokens, hidden], weights and experts [tokens, top_k] from `route`, gate_up [experts, 2 * size, hidden], down
    [experts, hidden, size]. Tokens are sorted by expert, so that each expert with tokens computes one matrix product.
    With `biases`, each projection adds the bias of its expert. Without a gate, gate_up is up alone [experts, size,
    hidden], and the activation `squared_relu`.
    """

    def one(expert: int, rows: torch.Tensor) -> torch.Tensor:
        bias = (None, None) if biases is None else (biases.gate_up[expert], biases.down[expert])
        projected = _project(rows, gate_up[expert], bias[0])
        acted = squared_relu(projected) if gate is None else act_and_mul(projected, gate)
        return _project(acted, down[expert], bias[1])

    return by_expert(x, weights, experts, len(gate_up), one)


def by_expert(
    x: torch.Tensor,
    weights: torch.Tensor,
    experts: torch.Tensor,
    count: int,
    one: Callable[[int, torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    """Compute `fused_moe` for any experts: `one(e, x)` applies expert e of `count` to its tokens x [rows, hidden]."""
    tokens, top_k = experts.shape
    order = experts.flatten().argsort(stable=True)
    rows = x[order // top_k]
    out = torch.empty_like(rows)
    first = 0
    for expert, number in enumerate(experts.flatten().bincount(minlength=count).tolist()):
        if number:
            mine = slice(first, first + number)
            out[mine] = one(expert, rows[mine])
            first += number
    results = torch.empty_like(out).index_copy_(0, order, out).view(tokens, top_k, x.shape[1])
    return (results.float() * weights[..., None]).sum(1).to(x.dtype)


def _project(x: torch.Tensor, weight: torch.Tensor | QuantizedWeight, bias: torch.Tensor | None) -> torch.Tensor:
    return F.linear(x, weight, bias) if isinstance(weight, torch.Tensor) else linear_quantized(x, weight, bias)
