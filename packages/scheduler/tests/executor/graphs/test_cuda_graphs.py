"""Buckets, padding and the order of recording, on a recorder that plays graphs back on the CPU."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from packages.scheduler.tests.executor.graphs.graphed import (
    LENGTH,
    SLOTS,
    Graphed,
    LateReading,
    PlannedBefore,
    Rotating,
    Tape,
    init,
)
from tercet.kernels.attention.api import AttentionBackend
from tercet.kernels.attention.torch_native import TorchNativeAttention
from tercet.kernels.ops.bitmask import pack_bitmask
from tercet.kernels.triton import missing_triton
from tercet.protocol.messages.values import Grammar, GrammarKind
from tercet.scheduler.core.plan import PageUpdate, Plan, Row, SlotInit, StepResult
from tercet.scheduler.device.staging import Array
from tercet.scheduler.executor.chunked_model import OomChunkedModel
from tercet.scheduler.executor.graphs import cuda_graphs
from tercet.scheduler.executor.graphs.cuda_graphs import CudaGraphRunner, decode_buckets
from tercet.scheduler.executor.kv_pool import KVPool
from tercet.scheduler.executor.model_runner import ModelRunner
from tercet.scheduler.executor.sampling.sampler import Sampler
from tercet.scheduler.executor.sampling.slot_grammars import ConstrainedRows, GrammarOutcome, SlotGrammars
from tercet.scheduler.executor.slot_tables import SlotTables
from tercet.scheduler.models.layers.layer_ops import TORCH, TritonLayerOps


@pytest.fixture(autouse=True)
def _as_steps_are_run() -> Iterator[None]:
    with torch.inference_mode():
        yield


def test_buckets_are_fine_where_batches_are_small() -> None:
    assert decode_buckets(1) == [1]
    assert decode_buckets(6) == [6, 4, 2, 1]
    assert decode_buckets(100) == [100, 96, 80, 64, 56, 48, 40, 32, 24, 16, 8, 4, 2, 1]


def test_the_largest_is_recorded_first_and_one_at_a_time(attending: Any, steps: Any) -> None:
    tape = Tape()
    runner = Graphed(attending, steps(), tape).runner
    assert [runner.capture_next() for _ in range(4)] == [True, True, False, False]
    assert tape.recorded == [4, 2, 1]


@pytest.mark.parametrize("captures", [0, 1, 3])
@pytest.mark.parametrize("backend", [LateReading, PlannedBefore])
def test_replays_are_the_same_steps(
    captures: int, backend: Callable[[], AttentionBackend], attending: Any, steps: Any
) -> None:
    """Rows come and go between steps, pages change, and graphs are recorded between them too."""
    plain, given, tape = steps(), steps(), Tape()
    graphed = Graphed(attending, given, tape, backend)
    script = [
        [(0, 5, 5), (1, 9, 9), (2, 1, 1)],
        [(0, 1, 6), (1, 1, 10), (2, 1, 2)],
        [(0, 1, 7), (1, 1, 11), (2, 1, 3)],
        [(2, 1, 4)],
        [(1, 1, 12), (0, 1, 8)],
        [(1, 1, 13), (0, 1, 9)],
        [(0, 1, 10), (1, 1, 14), (2, 1, 5), (3, 1, 1)],
    ]
    for number, rows in enumerate(script):
        if number == 5:  # somebody else had the same prompt, and its page is taken over
            for each in (plain, given):
                page, other = each.tables[0, 1].item(), each.tables[3, 5].item()
                for cache in each.pool.layer(0):
                    cache[other] = cache[page]
                    cache[page] = 99
                each.tables[0, 1] = other
            graphed.tables.update_pages([PageUpdate(0, 1, [[other]])])
        batch = plain.step(rows)
        torch.testing.assert_close(graphed.step(rows), attending(batch.input_ids, batch.positions, batch))
        for _ in range(captures):
            graphed.runner.capture_next()
    assert tape.replays == (6 if captures else 0)
    for mine, theirs in zip(given.pool.layer(0), plain.pool.layer(0), strict=True):
        assert torch.equal(mine[:-1], theirs[:-1])  # all but the spare page


def test_replays_of_what_the_backend_rotates_are_the_same_steps(steps: Any) -> None:
    """With rows that pad them: of three rows in a graph of four, several write the spare page."""
    pytest.importorskip("triton", reason="the backend is Triton's")
    if missing := missing_triton(torch.device("cpu")):
        pytest.skip(missing)
    from tercet.kernels.attention.triton import TritonAttention

    plain, given, tape = steps(head_dim=16), steps(TritonAttention, head_dim=16), Tape()
    model, graphed = Rotating(TORCH), Graphed(Rotating(TritonLayerOps()), given, tape, TritonAttention)
    script = [
        [(0, 5, 5), (1, 9, 9), (2, 1, 1)],
        [(0, 1, 6), (1, 1, 10), (2, 1, 2)],
        [(2, 1, 3)],
        [(1, 1, 11), (0, 1, 7)],
        [(0, 1, 8), (1, 1, 12), (2, 1, 4), (3, 1, 1)],
    ]
    for rows in script:
        batch = plain.step(rows)
        expected = model(batch.input_ids, batch.positions, batch)
        with np.errstate(all="ignore"):
            torch.testing.assert_close(graphed.step(rows), expected)
            graphed.runner.capture_next()
    assert tape.replays == 4
    for mine, theirs in zip(given.pool.layer(0), plain.pool.layer(0), strict=True):
        torch.testing.assert_close(mine[:-1], theirs[:-1])


def test_no_more_buckets_are_recorded_than_steps_may_have_rows(attending: Any, steps: Any) -> None:
    """There may be more slots than choices that run, for steps in which one has several rows."""
    given, tape = steps(), Tape()
    made = Graphed(attending, given, tape)
    runner = CudaGraphRunner(
        attending, given.pool, [LateReading], tape, made.tables, Sampler(SLOTS, 50, torch.device("cpu")), decode_rows=2
    )
    while runner.capture_next():
        pass
    assert tape.recorded == [2, 1]


def test_what_is_longer_than_one_token_runs_as_it_is(attending: Any, steps: Any) -> None:
    tape = Tape()
    graphed = Graphed(attending, steps(), tape)
    while graphed.runner.capture_next():
        pass
    graphed.step([(0, 1, 1), (1, 2, 2)])
    assert tape.replays == 0


@pytest.mark.parametrize("launched", [False, True])
@pytest.mark.parametrize("error", [torch.OutOfMemoryError(), RuntimeError("CUDA error: out of memory"), MemoryError()])
def test_without_memory_a_bucket_is_left_out(
    error: Exception, launched: bool, attending: Any, steps: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And what it was given is the device's again before the next is tried."""
    tape = Tape(2, error, launched=launched)
    graphed = Graphed(attending, steps(), tape)
    given_back: list[int] = []
    monkeypatch.setattr(cuda_graphs, "release_cached", lambda: given_back.append(tape.tried))
    while graphed.runner.capture_next():
        pass
    assert tape.recorded == [4, 1]
    assert given_back == [2]
    assert len(graphed.step([(0, 1, 1), (1, 1, 1)])) == 2
    assert tape.replays == 1


def test_where_recording_fails_steps_are_launched_as_they_are(attending: Any, steps: Any) -> None:
    tape = Tape(2, RuntimeError("not permitted when stream is capturing"))
    graphed = Graphed(attending, steps(), tape)
    assert graphed.runner.capture_next()
    assert not graphed.runner.capture_next()
    assert not graphed.runner.capture_next(), "no other is tried"
    assert tape.recorded == [4]
    assert len(graphed.step([(0, 1, 1), (1, 1, 1)])) == 2


def test_without_spare_pages_nothing_can_be_recorded(attending: Any, steps: Any) -> None:
    cpu = torch.device("cpu")
    tables, sampler = SlotTables(SLOTS, LENGTH, page_size=4, groups=1, device=cpu), Sampler(SLOTS, 50, cpu)
    with pytest.raises(ValueError, match="spare"):
        CudaGraphRunner(attending, steps().pool, [LateReading], Tape(), tables, sampler)


class Given(ConstrainedRows):
    """Rows whose masks are there."""

    def __init__(self, masks: torch.Tensor) -> None:
        self._given = masks

    def masks(self) -> torch.Tensor:
        return self._given

    def advance(self, tokens: Sequence[int], lengths: Sequence[int]) -> GrammarOutcome:
        return GrammarOutcome()


class Odd(SlotGrammars):
    """Whoever has a grammar says odd tokens."""

    def __init__(self) -> None:
        self.slots: set[int] = set()

    def introduce(self, inits: Sequence[SlotInit]) -> None:
        for given in inits:
            self.slots.discard(given.slot)
            if given.sampling.grammar is not None:
                self.slots.add(given.slot)

    def begin(self, step: int, slots: Array, assumed: Sequence[int | None] = ()) -> ConstrainedRows | None:
        if self.slots.isdisjoint(slots.tolist()):
            return None
        free = torch.tensor([slot not in self.slots for slot in slots])
        return Given(pack_bitmask((torch.arange(50) % 2 == 1) | free[:, None]))


GREEDY: dict[str, Any] = {"temperature": 0.0}
PLAIN: dict[str, Any] = {"temperature": 1.1}
FILTERED: dict[str, Any] = {"temperature": 1.2, "top_p": 0.8}
BOTH: dict[str, Any] = {"temperature": 0.9, "top_k": 9, "top_p": 0.9}


@pytest.mark.parametrize(
    ("kinds", "others", "samplings"),
    [
        ([GREEDY] * 3, GREEDY, 7),
        ([PLAIN] * 3, PLAIN, 7),
        ([FILTERED, BOTH, BOTH], FILTERED, 7),
        ([PLAIN] * 3, GREEDY, 6),
        ([PLAIN, FILTERED, GREEDY], PLAIN, 1),
        ([PLAIN, PLAIN, PLAIN | {"repetition_penalty": 3.0}], GREEDY, 1),
        ([PLAIN, PLAIN, PLAIN | {"logit_bias": {3: 5.0}}], GREEDY, 1),
        ([PLAIN, PLAIN, PLAIN | {"top": 1}], GREEDY, 1),
        ([PLAIN, PLAIN, PLAIN | {"grammar": Grammar(GrammarKind.REGEX, "a*")}], GREEDY, 1),
    ],
    ids=["greedy", "plain", "filtered", "others later", "several", "penalties", "biases", "logprobs", "grammars"],
)
def test_a_runner_does_not_notice(
    kinds: list[dict[str, Any]], others: dict[str, Any], samplings: int, attending: Any, steps: Any
) -> None:
    """Plans, with graphs and without: two choices end, others take their slots, and a row samples nothing once.

    Nobody asks for a result before all steps are started.
    """

    def run(graphs: Callable[..., CudaGraphRunner] | None, pool: KVPool) -> list[StepResult]:
        runner = ModelRunner(
            OomChunkedModel(attending),
            pool,
            TorchNativeAttention,
            slots=SLOTS,
            context_length=23,
            vocab_size=50,
            device=torch.device("cpu"),
            grammars=Odd(),
            graphs=graphs,
        )
        prompts = [[5, 9, 2, 44], [7], [30, 31, 32, 33, 34, 35]]
        inits = [init(slot, ids, **kinds[slot]) for slot, ids in enumerate(prompts)]
        pages = [PageUpdate(slot, 0, [[slot * 5 + page for page in range(5)]]) for slot in range(3)]
        rows = [Row(slot, 0, len(ids), sample=True) for slot, ids in enumerate(prompts)]
        given = []
        for step in range(14):
            plan = Plan(step=step, introduce=inits, pages=pages, rows=rows)
            given.append(runner.execute(plan))
            inits, pages = [], []
            rows = [Row(row.slot, row.start + row.count, 1, sample=step != 11 or row.slot == 1) for row in rows]
            if step == 8:
                inits = [init(slot, [slot, 40 + slot], **others) for slot in range(2)]
                rows = [Row(slot, 0, 2, sample=True) for slot in range(2)]
            if runner.graphs is not None:
                runner.graphs.capture_next()
        return [output.result() for output in given]

    tape, given = Tape(), steps()
    expected = run(None, steps().pool)
    assert run(partial(CudaGraphRunner, attending, given.pool, [LateReading], tape), given.pool) == expected
    decodes = 8 + 4
    assert tape.replays == decodes + samplings
    assert expected[-2].token_ids[0] == -1
    assert len({token for result in expected for token in result.token_ids}) > 3


def test_sampling_of_the_largest_bucket_is_recorded_first(attending: Any, steps: Any) -> None:
    """What it takes is room for the others, whichever is wanted first."""
    graphed, tape = Graphed(attending, steps(), Tape()), Tape()
    runner = graphed.runner
    while runner.capture_next():
        pass
    runner._recorder = tape
    for rows in (1, 2, 1):
        inputs = graphed.tables.gather([Row(slot, 5, 1, sample=True) for slot in range(rows)])
        runner.replay(inputs)
        runner.replay_sampling(inputs)
    while runner.capture_next():
        pass
    assert tape.recorded[0] == SLOTS
    assert sorted(tape.recorded) == [1, 2, SLOTS]


@pytest.mark.parametrize("launched", [False, True])
@pytest.mark.parametrize("error", [torch.OutOfMemoryError(), RuntimeError("not permitted when stream is capturing")])
def test_where_sampling_cannot_be_recorded_it_is_launched(
    error: Exception, launched: bool, attending: Any, steps: Any
) -> None:
    given, tape = steps(), Tape(SLOTS, error, launched=launched)
    graphed = Graphed(attending, given, Tape())
    runner = graphed.runner
    while runner.capture_next():
        pass
    runner._recorder = tape
    inputs = graphed.tables.gather([Row(slot, 5, 1, sample=True) for slot in range(SLOTS)])
    for _ in range(3):
        assert runner.replay(inputs) is not None
        assert runner.replay_sampling(inputs) is None
        assert not runner.capture_next()
    assert tape.tried == 1
    assert tape.recorded == []
