"""The share of a step that a rank computes: all of it, or the rows of its own requests between embedding and head."""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

import torch

from tercet.scheduler.core.data_parallel.plans import plan_of
from tercet.scheduler.core.plan import Plan, Row
from tercet.scheduler.executor.slot_tables import StepInputs
from tercet.scheduler.models.layers.decoder import CausalLM
from tercet.scheduler.models.layers.moe import MixtureOfExperts
from tercet.scheduler.models.layers.shard import AttentionRanks

Gather = Callable[[Sequence[Row]], StepInputs]
"""Gathers the inputs of rows. See `SlotTables.gather`."""
Forward = Callable[[StepInputs], torch.Tensor]
"""Computes the hidden states [tokens, hidden] of inputs."""


class StepShare(Protocol):
    """The interface for the share of a rank."""

    def of(self, plan: Plan) -> Plan:
        """Return the part of a plan that concerns this rank's cache, adapters and rows."""
        ...

    def hidden(
        self, plan: Plan, own: Plan, inputs: StepInputs, gather: Gather, forward: Forward, *, scored: bool
    ) -> torch.Tensor:
        """Return the hidden states of all tokens of a plan, or unless `scored`, of all sampling rows.

        `own` is the rank's part, `inputs` are those of the plan.
        """
        ...


class WholeStep:
    """The `StepShare` of a rank that computes every row."""

    def of(self, plan: Plan) -> Plan:
        """Return the plan."""
        return plan

    def hidden(
        self,
        plan: Plan,  # noqa: ARG002
        own: Plan,  # noqa: ARG002
        inputs: StepInputs,
        gather: Gather,  # noqa: ARG002
        forward: Forward,
        *,
        scored: bool,  # noqa: ARG002
    ) -> torch.Tensor:
        """Return the hidden states of all tokens."""
        return forward(inputs)


class RankStep:
    """The `StepShare` of an attention rank.

    A rank without rows takes part in the exchange of experts' tokens. Then every rank gets the hidden states of all
    rows, and from there on all ranks do the same, except that each computes the logits of an equal run of rows.
    """

    def __init__(self, ranks: AttentionRanks, slots: int, model: torch.nn.Module, none: torch.Tensor) -> None:
        """Create the share of a rank with so many slots. `none` are no hidden states."""
        self._ranks = ranks
        self._slots = slots
        self._mixtures = [module for module in model.modules() if isinstance(module, MixtureOfExperts)]
        self._none = none

    def of(self, plan: Plan) -> Plan:
        """See `StepShare`."""
        return plan_of(plan, self._ranks.rank, self._slots)

    def hidden(
        self,
        plan: Plan,
        own: Plan,
        inputs: StepInputs,  # noqa: ARG002
        gather: Gather,
        forward: Forward,
        *,
        scored: bool,
    ) -> torch.Tensor:
        """See `StepShare`."""
        x = self._none
        if own.rows:
            x = forward(mine := gather(own.rows))
            x = x if scored else x[mine.sample_index]
        else:
            for mixture in self._mixtures:
                mixture.mixed_without_tokens(x.device)
        counts = self._counts(plan.rows, scored=scored)
        return self._gathered(x, counts) if any(counts) else x

    def _counts(self, rows: Iterable[Row], *, scored: bool) -> list[int]:
        """Return the number of hidden states that each rank has."""
        counts = Counter[int]()
        for row in rows:
            counts[row.slot // self._slots] += row.count if scored else row.sample
        return [counts[rank] for rank in range(self._ranks.size)]

    def _gathered(self, x: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
        """Return the hidden states of all ranks, in their order."""
        if self._ranks.all_to_all is None:
            raise TypeError("there is no connection to other ranks")
        rows = x.contiguous().view(torch.uint8).repeat(self._ranks.size, 1)
        return self._ranks.all_to_all(rows, [len(x)] * self._ranks.size, counts).view(x.dtype)


def step_share(ranks: AttentionRanks, slots: int, model: object, device: torch.device) -> StepShare:
    """Return the share of a rank with so many slots."""
    if ranks.size == 1:
        return WholeStep()
    if not isinstance(model, CausalLM):
        raise TypeError(f"{type(model).__name__} has no experts to divide")
    config = model.config
    return RankStep(ranks, slots, model, torch.empty(0, config.hidden_size, dtype=config.dtype, device=device))
