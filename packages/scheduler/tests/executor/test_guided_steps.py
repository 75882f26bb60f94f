"""Whether a step is sampled by a graph: every rank must say the same, though rank 0 alone reads grammars."""

from typing import Any

import torch

from tercet.kernels.attention.torch_native import TorchNativeAttention
from tercet.protocol.messages.values import Grammar, GrammarKind, SamplingParams, pack_ints
from tercet.scheduler.core.plan import PageUpdate, Plan, Row, SlotInit
from tercet.scheduler.executor.model_runner import ModelRunner
from tercet.scheduler.executor.slot_tables import StepInputs


def init(slot: int, tokens: list[int], grammar: Grammar | None = None) -> SlotInit:
    sampling = SamplingParams(max_new_tokens=20, seed=slot, grammar=grammar)
    return SlotInit(slot=slot, tokens=pack_ints(tokens), prompt_tokens=len(tokens), choice=0, sampling=sampling)


class Recorded:
    """`Replays` that have sampled whatever they are asked for."""

    def __init__(self) -> None:
        self.asked: list[list[int]] = []

    def replay(self, inputs: StepInputs, *, adapted: bool = False) -> None: ...

    def replay_sampling(self, inputs: StepInputs, *, adapted: bool = False) -> torch.Tensor:
        self.asked.append(inputs.slots.tolist())
        return torch.full((len(inputs.slots),), 7)

    def capture_next(self) -> bool:
        return False


def test_constrained_rows_are_not_sampled_by_a_graph(attending: Any, steps: Any) -> None:
    """Rank 0 masks them and so samples them as they are: so must a follower, which has no grammars."""
    recorded = Recorded()
    runner = ModelRunner(
        attending,
        steps().pool,
        TorchNativeAttention,
        slots=2,
        context_length=23,
        vocab_size=50,
        device=torch.device("cpu"),
        graphs=lambda *_: recorded,
    )
    inits = [init(0, [1, 2]), init(1, [3, 4], grammar=Grammar(GrammarKind.REGEX, "a"))]
    pages = [PageUpdate(slot, 0, [[slot]]) for slot in range(2)]
    rows = [Row(slot, 0, 2, sample=True) for slot in range(2)]
    runner.execute(Plan(step=0, introduce=inits, pages=pages, rows=rows))
    assert recorded.asked == []
    (token,) = runner.execute(Plan(step=1, rows=rows[:1])).result().token_ids
    assert (token, recorded.asked) == (7, [[0]])
    runner.execute(Plan(step=2, introduce=[init(1, [3, 4])], rows=rows))
    assert recorded.asked == [[0], [0, 1]]
