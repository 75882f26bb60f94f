"""A mixture of experts: every token goes through a few of many gated MLPs, and their results are weighed."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812

from tercet.kernels.ops.activation import Gate, act_and_mul
from tercet.kernels.ops.quantised import QuantisedWeight, linear_quantised


@dataclass(frozen=True, eq=False)
class QuantisedExperts:
    """Weights [count, n, k] of experts: all their outputs, one expert's below another's, in one of [count * n, k].

    Raises ValueError where a block of rows would reach over two experts.
    """

    weight: QuantisedWeight
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

    def __getitem__(self, expert: int) -> QuantisedWeight:
        """The weight [n, k] of one of them."""
        weight, n = self.weight, self.shape[1]
        scaled = slice(expert * n // weight.block[0], (expert + 1) * n // weight.block[0])
        return QuantisedWeight(
            format=weight.format,
            codes=weight.codes[expert * n : (expert + 1) * n],
            scales=weight.scales[scaled],
            zeros=None if weight.zeros is None else weight.zeros[scaled],
            block=weight.block,
        )


ExpertWeights = torch.Tensor | QuantisedExperts
"""One projection of all experts: [experts, outputs, inputs]."""


class ExpertBiases(NamedTuple):
    """What is added to the projections of experts."""

    gate_up: torch.Tensor  # [experts, 2 * size]
    down: torch.Tensor  # [experts, hidden]


def route(router_logits: torch.Tensor, top_k: int, *, renormalise: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """(weights float32 [tokens, top_k], experts int64 [tokens, top_k]) of logits [tokens, experts].

    The weights are softmax probabilities; renormalised, those of a token add up to 1.
    """
    probabilities = router_logits.float().softmax(-1)
    weights, experts = probabilities.topk(top_k, -1)
    return (weights / weights.sum(-1, keepdim=True) if renormalise else weights), experts


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
    """The same, of `count` experts, each of which makes [rows, hidden] of all its rows [rows, hidden] at once."""
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


def _project(x: torch.Tensor, weight: torch.Tensor | QuantisedWeight, bias: torch.Tensor | None) -> torch.Tensor:
    return F.linear(x, weight, bias) if isinstance(weight, torch.Tensor) else linear_quantised(x, weight, bias)
