"""Steps in which a slot has several rows: each computes a token that is only assumed, and sees those before it."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from packages.scheduler.tests.executor.graphs.graphed import SLOTS, Graphed, LateReading, Rotating, Tape, init
from tercet.kernels.attention.torch_native import TorchNativeAttention
from tercet.kernels.triton import missing_triton
from tercet.scheduler.core.plan import PageUpdate, Plan, Row, StepResult
from tercet.scheduler.executor.chunked_model import OomChunkedModel
from tercet.scheduler.executor.graphs.cuda_graphs import CudaGraphRunner
from tercet.scheduler.executor.kv_pool import KVPool
from tercet.scheduler.executor.model_runner import ModelRunner
from tercet.scheduler.executor.slot_tables import SlotTables
from tercet.scheduler.models.layers.layer_ops import TORCH, TritonLayerOps

CPU = torch.device("cpu")
Rows = Sequence[tuple[int, int, int]]
"""(sequence, its new tokens, its tokens after the step)"""


@pytest.fixture(autouse=True)
def _as_steps_are_run() -> Any:
    with torch.inference_mode():
        yield


def chained(rows: Rows) -> list[tuple[int, int, int]]:
    """The same tokens, each in a row of its own."""
    return [(slot, 1, length - count + more + 1) for slot, count, length in rows for more in range(count)]


@pytest.mark.parametrize("spare", [[], [100]])
def test_rows_of_a_slot_follow_one_another(spare: list[int]) -> None:
    tables = SlotTables(SLOTS, 24, page_size=4, groups=1, device=CPU, spare_pages=spare)
    for slot, tokens in enumerate(([1, 2, 3, 4], [11, 12, 13])):
        tables.introduce(init(slot, tokens))
        tables.update_pages([PageUpdate(slot, 0, [[10 * slot + page for page in range(5)]])])
    rows = [Row(0, 3, 1, sample=True), Row(1, 2, 1, sample=True), *(Row(1, at, 1, sample=True) for at in (3, 4))]
    tables.assume(rows, {2: 44, 3: 45})
    inputs = tables.gather(rows)
    assert inputs.chained
    assert inputs.in_fixed_buffers == bool(spare)
    assert tables.ids_at(inputs.places).tolist() == [4, 13, 44, 45]
    assert inputs.output_positions.tolist() == inputs.sent_positions.tolist() == [0, 0, 1, 2]
    [batch] = inputs.attention
    assert batch.kv_lens.tolist() == batch.host_kv_lens == [4, 3, 4, 5]
    assert batch.slot_mapping.tolist() == [3, 42, 43, 44]
    tables.write_sampled(inputs.sampled_places, torch.tensor([5, 44, 77, 78]))
    assert tables.read(1, 0, 6).tolist() == [11, 12, 13, 44, 77, 78]
    assert not tables.gather(rows[:2]).chained


def test_more_rows_than_there_are_slots_do_not_lie_in_place() -> None:
    tables = SlotTables(SLOTS, 24, page_size=4, groups=1, device=CPU, spare_pages=[100])
    tables.introduce(init(0, [1]))
    rows = [Row(0, at, 1, sample=True) for at in range(SLOTS + 1)]
    assert tables.gather(rows[:SLOTS]).in_fixed_buffers
    inputs = tables.gather(rows)
    assert not inputs.in_fixed_buffers
    assert len(inputs.places) == SLOTS + 1


SCRIPT: list[Rows] = [
    [(0, 5, 5), (1, 9, 9)],
    [(0, 2, 7), (1, 1, 10)],
    [(0, 1, 8), (1, 1, 11)],
    [(0, 3, 10)],
    [(0, 1, 10), (1, 2, 12)],  # what slot 0 assumed last was wrong
    [(0, 2, 12), (1, 2, 14)],
]


def is_chained(rows: Rows) -> bool:
    return any(1 < count < 5 for _, count, _ in rows)


def test_chained_steps_are_replayed_from_graphs_of_their_own(attending: Any, steps: Any) -> None:
    plain, given, tape = steps(), steps(), Tape()
    graphed = Graphed(attending, given, tape)
    graphed.runner._chained_rows = SLOTS
    while graphed.runner.capture_next():
        pass
    assert tape.recorded == [4, 2, 1]
    replayed = []
    for rows in SCRIPT:
        batch = plain.step(rows)
        expected = attending(batch.input_ids, batch.positions, batch)
        before = tape.replays
        mine = graphed.step(chained(rows) if is_chained(rows) else rows)
        torch.testing.assert_close(mine, expected)
        replayed.append(tape.replays > before)
        while graphed.runner.capture_next():
            pass
    assert replayed == [False, False, True, True, True, True]
    assert tape.recorded == [4, 2, 1, 4, 2]
    for mine, theirs in zip(given.pool.layer(0), plain.pool.layer(0), strict=True):
        torch.testing.assert_close(mine[:-1], theirs[:-1])


@pytest.mark.parametrize("captures", [False, True])
def test_what_a_backend_rotates_is_stored_before_the_rows_behind_it_attend(captures: bool, steps: Any) -> None:
    """A kernel that rotates, stores and attends at once would let a row read what another is just writing."""
    pytest.importorskip("triton", reason="the backend is Triton's")
    if missing := missing_triton(CPU):
        pytest.skip(missing)
    from tercet.kernels.attention.triton import TritonAttention

    class CountingAttention(TritonAttention):
        rotated = 0

        def attend_new(self, *given: Any, **options: Any) -> torch.Tensor:
            CountingAttention.rotated += 1
            return super().attend_new(*given, **options)

    plain, given = steps(head_dim=16), steps(CountingAttention, head_dim=16)
    model, graphed = Rotating(TORCH), Graphed(Rotating(TritonLayerOps()), given, Tape(), CountingAttention)
    graphed.runner._chained_rows = SLOTS
    for rows in SCRIPT:
        batch = plain.step(rows)
        expected = model(batch.input_ids, batch.positions, batch)
        before = CountingAttention.rotated
        with np.errstate(all="ignore"):
            mine = graphed.step(chained(rows) if is_chained(rows) else rows)
            torch.testing.assert_close(mine, expected)
            decodes = not is_chained(rows) and rows[0][1] == 1
            assert (CountingAttention.rotated > before) == decodes
            while captures and graphed.runner.capture_next():
                pass
    for one, other in zip(given.pool.layer(0), plain.pool.layer(0), strict=True):
        torch.testing.assert_close(one[:-1], other[:-1])


@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("params", [{"temperature": 0.0}, {"temperature": 1.1}, {"temperature": 0.9, "top_p": 0.8}])
def test_accepted_draft_tokens_equal_single_steps(
    graphs: bool, params: dict[str, Any], attending: Any, steps: Any
) -> None:
    """And what follows a wrong one is computed over."""

    def runner(pool: KVPool, made: Callable[..., CudaGraphRunner] | None) -> ModelRunner:
        given = ModelRunner(
            OomChunkedModel(attending),
            pool,
            TorchNativeAttention,
            slots=SLOTS,
            context_length=23,
            vocab_size=50,
            device=CPU,
            graphs=made,
        )
        prompts = [[5, 9, 2, 44], [7]]
        given.execute(
            Plan(
                step=0,
                introduce=[init(slot, ids, **params) for slot, ids in enumerate(prompts)],
                pages=[PageUpdate(slot, 0, [[slot * 5 + page for page in range(5)]]) for slot in range(2)],
                rows=[Row(slot, 0, len(ids), sample=True) for slot, ids in enumerate(prompts)],
            )
        )
        return given

    def run(given: ModelRunner, rows: Sequence[Row], assumed: dict[int, int] | None = None) -> StepResult:
        result = given.execute(Plan(step=1, rows=list(rows), draft_tokens=assumed or {})).result()
        while given.graphs is not None and given.graphs.capture_next():
            pass
        return result

    plain = runner(steps().pool, None)
    said = [
        run(plain, [Row(0, 4 + step, 1, sample=True), Row(1, 1 + step, 1, sample=True)]).token_ids for step in range(9)
    ]
    pool = steps().pool
    made = partial(CudaGraphRunner, attending, pool, [LateReading], Tape(), chained_rows=SLOTS) if graphs else None
    guessing = runner(pool, made)
    truth = [tokens[0] for tokens in said]
    for start in (0, 3):  # all right
        rows = [Row(0, 4 + start + more, 1, sample=True) for more in range(3)]
        rows.append(Row(1, 1 + start // 3, 1, sample=True))
        result = run(guessing, rows, {1: truth[start], 2: truth[start + 1]})
        assert result.token_ids == [*truth[start : start + 3], said[start // 3][1]]
    rows = [Row(0, 10 + more, 1, sample=True) for more in range(3)]
    result = run(guessing, rows, {1: truth[6], 2: (truth[7] + 1) % 50})
    assert result.token_ids[:2] == truth[6:8]
    assert run(guessing, [Row(0, 12, 1, sample=True)]).token_ids == [truth[8]]
    assert len(set(truth)) > 1 or not params["temperature"]
