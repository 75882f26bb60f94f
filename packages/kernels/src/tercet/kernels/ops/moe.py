"""A mixture of experts: every token goes through a few of many gated MLPs, and their results are weighed."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812

from tercet.kernels.ops.activation import Gate, act_and_mul
from tercet.kernels.ops.quantized import QuantizedWeight, linear_quantized


@dataclass(frozen=True, eq=False)
class QuantizedExperts:
    """Weights [count, n, k] of experts, stored as one weight [count * n, k], expert after expert.

    Raises ValueError where a block of rows would reach over two experts.
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
        """The weight [n, k] of one of them."""
        weight, n = self.weight, self.shape[1]
        scaled = slice(expert * n // weight.block[0], (expert + 1) * n // weight.block[0])
        return QuantizedWeight(
            format=weight.format,
            codes=weight.codes[expert * n : (expert + 1) * n],
            scales=weight.scales[scaled],
            zeros=None if weight.zeros is None else weight.zeros[scaled],
            block=weight.block,
        )


ExpertWeights = torch.Tensor | QuantizedExperts
"""One projection of all experts: [experts, outputs, inputs]."""


class ExpertBiases(NamedTuple):
    """What is added to the projections of experts."""

    gate_up: torch.Tensor  # [experts, 2 * size]
    down: torch.Tensor  # [experts, hidden]


Score = Literal["softmax", "sigmoid"]
"""The function that turns router logits into scores."""
LEAST = 1e-20
"""Added to the sum that weights are divided by, so that weights that are all 0 stay 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Routing:
    """How a router chooses a token's experts, and what weighs these."""

    top_k: int
    score: Score = "softmax"
    renormalize: bool = False
    """Whether the weights of a token's experts are made to add up to 1, before they are scaled."""
    scale: float = 1.0
    """What weights are multiplied by."""
    groups: int = 1
    """How many groups of neighbours, all of one size, the experts are in."""
    top_groups: int = 1
    """How many groups, those of most worth, a token's experts are taken from."""
    group_best: int = 1
    """A group's worth is the sum of so many of its best scores."""

    @property
    def limited(self) -> bool:
        """Whether groups restrict which experts a token can have."""
        return self.top_groups < self.groups


def route(
    router_logits: torch.Tensor, routing: Routing, correction: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """(weights float32 [tokens, top_k], experts int64 [tokens, top_k]) of logits [tokens, experts].

    Experts, and groups, are chosen by their scores plus `correction` float32 [experts], if there is one; the weights of
    those chosen are made of their scores alone.
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
    """Scores [tokens, experts], those of experts that are out being -inf."""
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
    gate: Gate = "silu",
    biases: ExpertBiases | None = None,
) -> torch.Tensor:
    """Sum over a token's experts e of weight * down[e] @ act_and_mul(gate_up[e] @ x, gate), in x's dtype.

    x [tokens, hidden], weights and experts [tokens, top_k] as of `route`, gate_up [experts, 2 * size, hidden], down
    [experts, hidden, size]. Tokens are brought into the order of their experts, so that each expert that has any is one
    matrix product over all of them. With `biases` each projection adds its expert's.
    """

    def one(expert: int, rows: torch.Tensor) -> torch.Tensor:
        bias = (None, None) if biases is None else (biases.gate_up[expert], biases.down[expert])
        acted = act_and_mul(_project(rows, gate_up[expert], bias[0]), gate)
        return _project(acted, down[expert], bias[1])

    return by_expert(x, weights, experts, len(gate_up), one)


def by_expert(
    x: torch.Tensor,
    weights: torch.Tensor,
    experts: torch.Tensor,
    count: int,
    one: Callable[[int, torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    """`fused_moe` over any experts: `one(e, x)` is what expert e of `count` makes of its tokens x [rows, hidden]."""
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
