"""Steps that find no memory to sample or to score, against the same steps undisturbed."""

import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from tercet.kernels.attention.torch_native import TorchNativeAttention
from tercet.kernels.ops import sampler_ops
from tercet.kernels.ops.bitmask import pack_bitmask
from tercet.protocol.messages.values import Logprobs, SamplingParams, pack_ints, unpack_floats
from tercet.scheduler.core.plan import PageUpdate, Plan, Row, SlotInit, StepResult
from tercet.scheduler.device.staging import Array
from tercet.scheduler.executor.model_runner import ModelRunner
from tercet.scheduler.executor.sampling.penalty_counts import PenaltyCounts
from tercet.scheduler.executor.sampling.sampler import Sampled, TokenLogprobs, join_sampled
from tercet.scheduler.executor.sampling.slot_grammars import ConstrainedRows, GrammarOutcome, SlotGrammars

VOCAB, STEPS = 50, 5
CPU = torch.device("cpu")
PROMPTS = [[5, 9, 2, 44], [7], [30, 31, 32, 33, 34, 35, 36], [8, 8, 8], [1, 2, 3]]
PARAMS: list[dict[str, Any]] = [
    {"temperature": 0.0, "frequency_penalty": 1.5, "logit_bias": {9: 2.0}},
    {"temperature": 1.3},
    {"temperature": 0.9, "repetition_penalty": 1.7, "top_p": 0.9},
    {"temperature": 1.5, "top_k": 8},
    {"temperature": 0.0, "presence_penalty": 0.8, "top_k": 1},
]
TOPS = [0, 3, -1, 1, 2]
PENALISED = [0, 2, 4]
KNOWN_AFTER = 8
"""Failures of two sizes to sample, and of two to score, each tried twice: fewer than two in every step."""


class Scarce:
    """Sampling operations, of which one finds no memory: at some calls, or for more rows than there is room for."""

    def __init__(self, name: str = "", calls: Sequence[int] = (), room: int = 99) -> None:
        self.name, self.calls, self.room = name, calls, room
        self.called = 0
        self.failed = 0

    def __getattr__(self, name: str) -> Any:
        operation = getattr(sampler_ops, name)
        return self.guarded(operation) if name == self.name else operation

    def guarded(self, operation: Callable[..., Any]) -> Callable[..., Any]:
        def run(logits: torch.Tensor, *given: Any) -> Any:
            self.called += 1
            if self.called in self.calls or len(logits) > self.room:
                self.failed += 1
                raise torch.OutOfMemoryError
            return operation(logits, *given)

        return run


class ScarceLogits:
    """A model that finds no memory for the logits of more rows than there is room for."""

    def __init__(self, model: Any, room: int, error: Exception | None = None) -> None:
        self.model, self.room = model, room
        self.error = error or MemoryError()
        self.failed = 0

    def __call__(self, *given: Any) -> Any:
        return self.model(*given)

    def compute_logits(self, hidden: torch.Tensor) -> Any:
        if len(hidden) > self.room:
            self.failed += 1
            raise self.error
        return self.model.compute_logits(hidden)


class Given(ConstrainedRows):
    """Rows whose masks are there."""

    def __init__(self, masks: torch.Tensor) -> None:
        self._given = masks

    def masks(self) -> torch.Tensor:
        return self._given

    def advance(self, tokens: Sequence[int], lengths: Sequence[int]) -> GrammarOutcome:
        return GrammarOutcome()


class EverySecond(SlotGrammars):
    """Grammars by which even slots say even tokens, and odd slots odd ones."""

    def __init__(self) -> None: ...

    def introduce(self, inits: Sequence[SlotInit]) -> None: ...

    def begin(self, step: int, slots: Array, assumed: Sequence[int | None] = ()) -> ConstrainedRows:
        return Given(pack_bitmask(torch.arange(VOCAB) % 2 == torch.tensor(slots)[:, None] % 2))


@dataclass
class Told:
    """What some steps gave, and how often every penalised choice has said each token after them."""

    steps: list[StepResult]
    counts: list[list[int]]

    def scores(self) -> list[Logprobs]:
        return [
            given
            for step in self.steps
            for part in (step.logprobs, step.prompt_logprobs)
            for _, given in sorted(part.items())
        ]


def play(model: Any, pool: Any, ops: Any = sampler_ops, *, overlap: int = 0, **options: Any) -> Told:
    """All prompts, then a token for each: of the third, whose prompt is cut in two, one less."""
    sizes: dict[str, Any] = {"slots": 5, "context_length": 23, "vocab_size": VOCAB}
    runner = ModelRunner(model, pool, TorchNativeAttention, **sizes, device=CPU, sampling_ops=ops, **options)
    inits = [
        SlotInit(
            slot=slot,
            tokens=pack_ints(ids),
            prompt_tokens=len(ids),
            choice=0,
            sampling=SamplingParams(max_new_tokens=20, seed=slot, **PARAMS[slot]),
            top_logprobs=TOPS[slot],
            prompt_logprobs=slot in (0, 2),
        )
        for slot, ids in enumerate(PROMPTS)
    ]
    pages = [PageUpdate(slot, 0, [[slot * 4 + page for page in range(4)]]) for slot in range(5)]
    rows = [Row(slot, 0, len(ids) - 2 * (slot == 2), sample=slot != 2) for slot, ids in enumerate(PROMPTS)]
    pending, steps = deque[Any](), []
    for step in range(STEPS + 1):
        first = step == 0
        pending.append(runner.execute(Plan(step=step, introduce=inits * first, pages=pages * first, rows=rows)))
        rows = [Row(row.slot, row.start + row.count, 2 if first and row.slot == 2 else 1, sample=True) for row in rows]
        if len(pending) > overlap:
            steps.append(pending.popleft().result())
    steps += [each.result() for each in pending]
    counts = runner._sampler._counts
    return Told(steps, [counts.table.output[row].tolist() for row in counts.rows(PENALISED)])


def assert_same(told: Told, expected: Told) -> None:
    assert [step.token_ids for step in told.steps] == [step.token_ids for step in expected.steps]
    assert told.counts == expected.counts
    assert len(told.scores()) == len(expected.scores()) > 4 * STEPS
    for actual, wanted in zip(told.scores(), expected.scores(), strict=True):
        assert (actual.top, actual.top_ids) == (wanted.top, wanted.top_ids)
        assert [*unpack_floats(actual.chosen)] == pytest.approx([*unpack_floats(wanted.chosen)], rel=1e-4, abs=1e-5)
        pairs = [torch.tensor([*unpack_floats(each.top_logprobs)]) for each in (actual, wanted)]
        torch.testing.assert_close(*pairs, rtol=1e-4, atol=1e-5)


@pytest.fixture
def expected(attending: Any, steps: Any) -> Told:
    told = play(attending, steps().pool)
    said = [[step.token_ids[slot] for step in told.steps if step.token_ids[slot] >= 0] for slot in range(5)]
    assert told.counts == [torch.tensor(said[slot]).bincount(minlength=VOCAB).tolist() for slot in PENALISED]
    assert len({token for tokens in said for token in tokens}) > 5
    return told


@pytest.mark.parametrize("overlap", [0, 1])
@pytest.mark.parametrize("call", [1, 2, 5])
@pytest.mark.parametrize("name", ["greedy", "sample", "apply_penalties_", "token_logprobs"])
def test_a_step_that_found_no_memory_once_gives_the_same(
    name: str, call: int, overlap: int, attending: Any, steps: Any, expected: Told
) -> None:
    ops = Scarce(name, [call])
    assert_same(play(attending, steps().pool, ops, overlap=overlap), expected)
    assert ops.failed == 1


@pytest.mark.parametrize("overlap", [0, 1])
@pytest.mark.parametrize(
    ("name", "room"), [("sample", 1), *((name, room) for name in ("greedy", "token_logprobs") for room in (1, 3))]
)
def test_rows_are_sampled_in_as_few_parts_as_there_is_room_for(
    name: str, room: int, overlap: int, attending: Any, steps: Any, expected: Told
) -> None:
    ops = Scarce(name, room=room)
    assert_same(play(attending, steps().pool, ops, overlap=overlap), expected)
    assert 0 < ops.failed <= KNOWN_AFTER


@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate memory")])
@pytest.mark.parametrize("room", [1, 2])
def test_rows_whose_logits_find_no_memory_are_cut_too(
    room: int, error: Exception, attending: Any, steps: Any, expected: Told
) -> None:
    model = ScarceLogits(attending, room, error)
    assert_same(play(model, steps().pool), expected)
    assert 0 < model.failed <= KNOWN_AFTER


@pytest.mark.parametrize("room", [1, 2])
def test_every_row_keeps_its_own_mask(room: int, attending: Any, steps: Any) -> None:
    undisturbed = play(attending, steps().pool, grammars=EverySecond())
    ops = Scarce("apply_bitmask_", room=room)
    told = play(attending, steps().pool, ops, grammars=EverySecond())
    assert 0 < ops.failed <= KNOWN_AFTER
    assert_same(told, undisturbed)
    for step in told.steps[1:]:
        assert [token % 2 for token in step.token_ids] == [0, 1, 0, 1, 0]


def test_one_row_that_finds_no_memory_is_an_error(attending: Any, steps: Any) -> None:
    with pytest.raises(torch.OutOfMemoryError):
        play(attending, steps().pool, Scarce("sample", room=0))


def test_parts_are_joined_as_if_there_were_none() -> None:
    def report(rows: list[int], tops: list[int], first: int) -> TokenLogprobs:
        ids = torch.arange(first, first + len(rows) * max(tops)).view(len(rows), -1)
        return TokenLogprobs(rows, tops, ids[:, :1].float().sum(1), ids, -ids.float())

    parts = [
        Sampled(torch.tensor([4, 5]), report([1], [1], 10)),
        Sampled(torch.tensor([6, 7, 8]), None),
        Sampled(torch.tensor([9]), report([0], [3], 20)),
    ]
    whole = join_sampled(parts)
    assert whole.tokens.tolist() == [4, 5, 6, 7, 8, 9]
    assert whole.logprobs is not None
    assert (whole.logprobs.rows, whole.logprobs.tops) == ([1, 5], [1, 3])
    assert whole.logprobs.chosen.tolist() == [10.0, 20.0]
    assert whole.logprobs.top_ids.tolist() == [[10, 0, 0], [20, 21, 22]]
    assert whole.logprobs.top_logprobs.tolist() == [[-10.0, 0.0, 0.0], [-20.0, -21.0, -22.0]]
    assert join_sampled(parts[1:2]).logprobs is None
    assert join_sampled(parts[1:2] * 2).tokens.tolist() == [6, 7, 8, 6, 7, 8]
    assert join_sampled(parts[1:2] * 2).logprobs is None


def refusing(operation: Callable[..., Any], at: int) -> Callable[..., Any]:
    """An operation whose call number `at` finds no memory."""
    calls = 0

    def run(*given: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == at:
            raise torch.OutOfMemoryError
        return operation(*given, **options)

    return run


@pytest.mark.parametrize(("name", "at"), [*(("cat", at) for at in (1, 2, 3, 4)), ("ones_like", 1), ("ones_like", 5)])
def test_counts_that_find_no_memory_are_as_they_were(name: str, at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Five choices, for which the table grows twice: whichever fails is introduced again."""
    counts = PenaltyCounts(VOCAB, CPU)
    with monkeypatch.context() as patched:
        patched.setattr(torch, name, refusing(getattr(torch, name), at))
        failed = 0
        for slot in range(5):
            known = [slot, 7, 10 + slot, 10 + slot]
            try:
                counts.introduce(slot, known, 2)
            except torch.OutOfMemoryError:
                failed += 1
                with pytest.raises(KeyError):
                    counts.rows([slot])
                counts.introduce(slot, known, 2)
    assert failed == 1
    rows = counts.rows(range(5))
    assert len({*rows}) == 5
    for slot, row in enumerate(rows):
        assert counts.table.output[row].nonzero().tolist() == [[10 + slot]]
        assert counts.table.output[row, 10 + slot] == 2
        assert counts.table.prompt[row].nonzero()[:, 0].tolist() == sorted([slot, 7])
    assert len(counts.table.output) == len(counts.table.prompt) == 8


def test_choices_are_introduced_when_memory_was_given_back(
    attending: Any, steps: Any, expected: Told, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "ones_like", refusing(torch.ones_like, 2))
    assert_same(play(attending, steps().pool), expected)


class Watched(ScarceLogits):
    """A model that knows whether somebody still holds logits that it gave."""

    def __init__(self, model: Any) -> None:
        super().__init__(model, 99)
        self.given: list[weakref.ref[torch.Tensor]] = []

    def compute_logits(self, hidden: torch.Tensor) -> Any:
        logits = super().compute_logits(hidden)
        self.given.append(weakref.ref(logits))
        return logits


@pytest.mark.parametrize("name", ["sample", "token_logprobs"])
def test_logits_of_a_try_that_failed_are_free_when_memory_is_given_back(name: str, attending: Any, steps: Any) -> None:
    model = Watched(attending)
    held: list[bool] = []

    def release() -> None:
        held.append(any(each() is not None for each in model.given))

    play(model, steps().pool, Scarce(name, [2]), release=release)
    assert held == [False]
