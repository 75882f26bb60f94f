"""Buckets, padding and the order of recording, on a recorder that plays graphs back on the CPU."""

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from tercet.kernels.attention.api import AttentionBackend
from tercet.kernels.attention.torch_native import TorchNativeAttention
from tercet.kernels.ops.rope import rope_cache
from tercet.kernels.triton import missing_triton
from tercet.protocol.values import SamplingParams, pack_ints
from tercet.scheduler.core.plan import PageUpdate, Plan, Row, SlotInit
from tercet.scheduler.executor.cuda_graphs import CudaGraphRunner, CudaRecorder, decode_buckets
from tercet.scheduler.executor.forward_batch import ForwardBatch
from tercet.scheduler.executor.kv_pool import KVPool
from tercet.scheduler.executor.model_runner import ModelRunner
from tercet.scheduler.executor.shrinking import ShrinkingModel
from tercet.scheduler.models.layer_ops import TORCH, LayerOps, TritonLayerOps

SLOTS = 4
GREEDY = SamplingParams(max_new_tokens=20, temperature=0.0)

SCRIPT = [
    [(0, 5, 5), (1, 9, 9), (2, 1, 1)],
    [(0, 1, 6), (1, 1, 10), (2, 1, 2)],
    [(2, 1, 3)],
    [(1, 1, 11), (0, 1, 7)],
    [(0, 1, 8), (1, 1, 12), (2, 1, 4), (3, 1, 1)],
]
"""Steps of rows (sequence, its new tokens, its tokens after the step): a prefill, then decodes of some of them."""


@pytest.fixture(autouse=True)
def _as_steps_are_run() -> Iterator[None]:
    with torch.inference_mode():
        yield


class LateReading(TorchNativeAttention):
    """Reads lengths from the tensors when it attends, as a kernel in a graph does."""

    capturable = True

    def attend(self, *given: Any, **options: Any) -> torch.Tensor:
        assert self._batch is not None
        self.plan(replace(self._batch, host_kv_lens=self._batch.kv_lens.tolist()))
        return super().attend(*given, **options)


class PlannedBefore(TorchNativeAttention):
    """Knows the lengths of a step only from its plan, as what plans on the host does."""

    capturable = True


class Tape:
    """A `Recorder` that runs the work again, into the tensor of the first result."""

    def __init__(self, fails: int = 0, error: Exception | None = None) -> None:
        self.fails = fails
        self.error = error or torch.OutOfMemoryError()
        self.recorded: list[int] = []
        self.replays = 0

    def record(self, run: Callable[[], torch.Tensor]) -> tuple[Callable[[], None], torch.Tensor]:
        output = run()
        if len(output) == self.fails:
            raise self.error
        self.recorded.append(len(output))

        def replay() -> None:
            self.replays += 1
            output.copy_(run())

        return replay, output


def graphs(
    model: Any, pool: KVPool, tape: Tape, backend: Callable[[], AttentionBackend] = LateReading
) -> CudaGraphRunner:
    cpu = torch.device("cpu")
    return CudaGraphRunner(model, pool, [backend], tape, slots=SLOTS, context_length=23, device=cpu)


def test_buckets_are_fine_where_batches_are_small() -> None:
    assert decode_buckets(1) == [1]
    assert decode_buckets(6) == [6, 4, 2, 1]
    assert decode_buckets(100) == [100, 96, 80, 64, 56, 48, 40, 32, 24, 16, 8, 4, 2, 1]


def test_the_largest_is_recorded_first_and_one_at_a_time(attending: Any, steps: Any) -> None:
    tape = Tape()
    runner = graphs(attending, steps().pool, tape)
    assert [runner.capture_next() for _ in range(4)] == [True, True, False, False]
    assert tape.recorded == [4, 2, 1]


@pytest.mark.parametrize("captures", [0, 1, 3])
@pytest.mark.parametrize("backend", [LateReading, PlannedBefore])
def test_replays_are_the_same_steps(
    captures: int, backend: Callable[[], AttentionBackend], attending: Any, steps: Any
) -> None:
    """Rows come and go between steps, and graphs are recorded between them too."""
    plain, graphed, tape = steps(), steps(), Tape()
    runner = graphs(attending, graphed.pool, tape, backend)
    for rows in SCRIPT:
        expected_batch, batch = plain.step(rows), graphed.step(rows)
        expected = attending(expected_batch.input_ids, expected_batch.positions, expected_batch)
        actual = runner(batch.input_ids, batch.positions, batch)
        torch.testing.assert_close(actual, expected)
        for _ in range(captures):
            runner.capture_next()
    assert tape.replays == (4 if captures else 0)
    for mine, theirs in zip(graphed.pool.layer(0), plain.pool.layer(0), strict=True):
        assert torch.equal(mine[:-1], theirs[:-1])  # all but the spare page


class Rotating:
    """A model of one layer, whose operations are given: they rotate what is new, and store it."""

    def __init__(self, ops: LayerOps) -> None:
        self.ops = ops
        self.embedding = torch.randn(50, 4, 16, generator=torch.Generator().manual_seed(3))
        self.table = rope_cache(32, 16, 100.0)
        self.norms = torch.linspace(0.5, 1.5, 16), torch.linspace(1.5, 0.5, 16), 1e-6

    def __call__(self, input_ids: torch.Tensor, positions: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        q, k, v = torch.split(self.embedding[input_ids], [2, 1, 1], 1)
        heads = q, k, v
        return self.ops.attend(batch, 0, heads, positions, self.table, self.norms, scale=0.25, window=0).flatten(1)

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden


def test_replays_of_what_the_backend_rotates_are_the_same_steps(steps: Any) -> None:
    """With rows that pad them: of three rows in a graph of four, several write the spare page."""
    pytest.importorskip("triton", reason="the backend is Triton's")
    if missing := missing_triton(torch.device("cpu")):
        pytest.skip(missing)
    from tercet.kernels.attention.triton import TritonAttention

    plain, graphed, tape = steps(head_dim=16), steps(TritonAttention, head_dim=16), Tape()
    model, fused = Rotating(TORCH), Rotating(TritonLayerOps())
    runner = graphs(fused, graphed.pool, tape, TritonAttention)
    for rows in SCRIPT:
        expected_batch, batch = plain.step(rows), graphed.step(rows)
        expected = model(expected_batch.input_ids, expected_batch.positions, expected_batch)
        with np.errstate(all="ignore"):
            actual = runner(batch.input_ids, batch.positions, batch)
            torch.testing.assert_close(actual, expected)
            runner.capture_next()
    assert tape.replays == 4
    for mine, theirs in zip(graphed.pool.layer(0), plain.pool.layer(0), strict=True):
        torch.testing.assert_close(mine[:-1], theirs[:-1])


def test_what_is_longer_than_one_token_runs_as_it_is(attending: Any, steps: Any) -> None:
    given, tape = steps(), Tape()
    runner = graphs(attending, given.pool, tape)
    while runner.capture_next():
        pass
    batch = given.step([(0, 1, 1), (1, 2, 2)])
    runner(batch.input_ids, batch.positions, batch)
    assert tape.replays == 0


@pytest.mark.parametrize("error", [torch.OutOfMemoryError(), RuntimeError("CUDA error: out of memory"), MemoryError()])
def test_without_memory_a_bucket_is_left_out(error: Exception, attending: Any, steps: Any) -> None:
    given, tape = steps(), Tape(2, error)
    runner = graphs(attending, given.pool, tape)
    while runner.capture_next():
        pass
    assert tape.recorded == [4, 1]
    batch = given.step([(0, 1, 1), (1, 1, 1)])
    assert len(runner(batch.input_ids, batch.positions, batch)) == 2
    assert tape.replays == 1


def test_where_recording_fails_steps_are_launched_as_they_are(attending: Any, steps: Any) -> None:
    given, tape = steps(), Tape(2, RuntimeError("not permitted when stream is capturing"))
    runner = graphs(attending, given.pool, tape)
    assert runner.capture_next()
    assert not runner.capture_next()
    assert not runner.capture_next(), "no other is tried"
    assert tape.recorded == [4]
    batch = given.step([(0, 1, 1), (1, 1, 1)])
    assert len(runner(batch.input_ids, batch.positions, batch)) == 2


class Stream:
    """As CUDA's, but it only remembers for whom it waited."""

    def __init__(self) -> None:
        self.waited: list[Stream] = []

    def wait_stream(self, other: "Stream") -> None:
        self.waited.append(other)


class Recording:
    """A graph without CUDA."""

    def capture_begin(self, **_: Any) -> None: ...

    def capture_end(self) -> None: ...

    def replay(self) -> None: ...


@pytest.mark.parametrize("good", [0, 1, 2])
def test_steps_wait_for_what_a_recording_launched_also_where_it_fails(
    good: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    current, side = Stream(), Stream()
    monkeypatch.setattr("torch.cuda.graph_pool_handle", lambda: (0, 0))
    monkeypatch.setattr("torch.cuda.Stream", lambda: side)
    monkeypatch.setattr("torch.cuda.current_stream", lambda: current)
    monkeypatch.setattr("torch.cuda.stream", nullcontext)
    monkeypatch.setattr("torch.cuda.CUDAGraph", Recording)
    answers = iter([torch.zeros(1)] * good)

    def run() -> torch.Tensor:
        assert side.waited == [current], "what steps wrote is there"
        assert not current.waited
        answer = next(answers, None)
        if answer is None:
            raise torch.OutOfMemoryError
        return answer

    with nullcontext() if good == 2 else pytest.raises(torch.OutOfMemoryError):
        CudaRecorder().record(run)
    assert current.waited == [side]


def test_a_runner_does_not_notice(attending: Any, steps: Any) -> None:
    """Plans, through what a GPU's worker puts around a model: graphs, and halves for want of memory."""

    def run(wrap: Callable[[KVPool], Any], between: Callable[[], object]) -> list[list[int]]:
        pool = steps().pool
        cpu = torch.device("cpu")
        runner = ModelRunner(
            wrap(pool), pool, TorchNativeAttention, slots=SLOTS, context_length=23, vocab_size=50, device=cpu
        )
        prompts = [[5, 9, 2, 44], [7], [30, 31, 32, 33, 34, 35]]
        inits = [
            SlotInit(slot=slot, tokens=pack_ints(ids), prompt_tokens=len(ids), choice=0, sampling=GREEDY)
            for slot, ids in enumerate(prompts)
        ]
        pages = [PageUpdate(slot, 0, [[slot * 5 + page for page in range(5)]]) for slot in range(3)]
        rows = [Row(slot, 0, len(ids), sample=True) for slot, ids in enumerate(prompts)]
        given = []
        for step in range(7):
            first = step == 0
            plan = Plan(step=step, introduce=inits * first, pages=pages * first, rows=rows)
            given.append(runner.execute(plan).result().token_ids)
            rows = [Row(row.slot, row.start + row.count, 1, sample=True) for row in rows][: 3 if step < 4 else 2]
            between()
        return given

    made: list[CudaGraphRunner] = []
    tape = Tape()

    def wrap(pool: KVPool) -> ShrinkingModel:
        made.append(graphs(attending, pool, tape))
        return ShrinkingModel(made[0])

    def capture() -> None:
        made[0].capture_next()

    expected = run(lambda _: attending, lambda: None)
    assert run(wrap, capture) == expected
    assert tape.replays == 6
    assert len({token for tokens in expected for token in tokens}) > 2
