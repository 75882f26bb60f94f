"""Requests on several attention ranks: every answer is the model's, each rank has its own memory, all step together."""

import io
import random
from typing import Any

import pytest

from tercet.protocol.messages.messages import (
    AbortReq,
    ContinueGenerationReq,
    ControlReply,
    ExclusiveReady,
    FlushCacheReq,
    LoadLoRAAdapterReq,
    PauseGenerationReq,
    ReleaseMemoryReq,
    ResumeMemoryReq,
    UpdateWeightsFromDiskReq,
)
from tercet.protocol.messages.values import Grammar, GrammarKind, LogprobParams, LoRAAdapter, MemoryTag, Resume
from tercet.scheduler.core.config import CoreConfig
from tercet.scheduler.core.data_parallel.plans import merged_plan, plan_of, results_of
from tercet.scheduler.core.data_parallel.scheduler import core_of
from tercet.scheduler.core.events import AdapterRead, PeerGone, WeightsRead
from tercet.scheduler.core.plan import PageCopy, PageUpdate, Plan, Row, StateRestore, StateSnapshot, StepResult
from tercet.scheduler.core.scheduler import Scheduler
from tercet.scheduler.diagnostics.event_log import LogFile, RecordingScheduler, read_events, replay
from tercet.scheduler.testing import request, small_capacity
from tercet.scheduler.testing.attention_ranks import FakeRanks, RanksDriver
from tercet.scheduler.testing.driver import FRONTEND

PROMPT = [*range(1, 14)]
LONG: dict[str, Any] = {"max_new_tokens": 12, "ignore_eos": True}
ADAPTER = LoRAAdapter("/adapters/a", "a" * 64)


def driver(ranks: int = 2, *, overlap: int = 0, budget: int = 16, executor: Any = None, **shape: Any) -> RanksDriver:
    config = CoreConfig(token_budget=budget, attention_ranks=ranks, draft_rows=0 if overlap else 8)
    return RanksDriver(small_capacity(**{"slots": 4, **shape}), config, overlap=overlap, executor=executor)


def replies(run: RanksDriver) -> list[ControlReply]:
    return [message for _, message, *_ in run.others if isinstance(message, ControlReply)]


@pytest.mark.parametrize("overlap", [0, 1])
@pytest.mark.parametrize("snapshots", [None, 12])
def test_every_answer_is_the_models(overlap: int, snapshots: int | None) -> None:
    """Prompts in chunks and in the cache, two choices, log-probabilities, and memory that makes choices retract."""
    run = driver(3, overlap=overlap, pages=20, snapshots=snapshots)
    chance = random.Random(overlap)
    wanted = []
    for number in range(40):
        prompt = [*PROMPT, *PROMPT, number] if number % 3 else [chance.randrange(1, 50) for _ in range(30)]
        logprobs = LogprobParams(prompt=True) if number % 5 == 0 else None
        wanted.append(request(f"r{number}", prompt, n=1 + number % 2, logprobs=logprobs, max_new_tokens=20))
        run.send(wanted[-1])
        run.step()
    run.run()
    for each in wanted:
        for choice in range(each.sampling.n):
            assert run.output[each.rid, choice] == run.answer(each, choice)
    cores = run.whole.cores
    assert all(core.counters.finished for core in cores)
    assert sum(core.counters.retractions for core in cores)
    assert sum(core.counters.cached_tokens for core in cores)
    assert {slot // 4 for slot in run.slots} == {0, 1, 2}
    run.assert_empty()


def test_late_masks_and_forced_tokens_come_to_their_rank() -> None:
    capacity = small_capacity(slots=4, grammars="scripted")

    def script(tokens: Any) -> tuple[Any, bool]:
        return ([tokens[-1] - 1] if tokens[-1] % 7 else ()), tokens[-1] == 28

    late: set[tuple[int, int]] = set()

    def defers(plan: Plan, row: Row) -> bool:
        """Let the mask of every row be late once."""
        first = (row.slot, row.start) not in late
        late.add((row.slot, row.start))
        return first

    run = driver(executor=FakeRanks(capacity, 2, grammar=script, defers=defers), grammars="scripted")
    run.fake = run.executor.ranks[0]  # type: ignore[attr-defined]
    grammar = Grammar(GrammarKind.REGEX, "x")
    wanted = [request(f"r{number}", [number, 41], grammar=grammar, max_new_tokens=9) for number in range(1, 7)]
    run.send(*wanted)
    run.run()
    assert [run.output[each.rid, 0] for each in wanted] == [run.answer(each) for each in wanted]
    assert all(core.counters.forced_tokens for core in run.whole.cores)
    run.assert_empty()


def test_requests_are_spread_and_a_prefix_is_found_on_its_rank() -> None:
    run = driver(2, slots=8, budget=64)
    first = [request(f"r{number}", [number] * 9, max_new_tokens=2) for number in range(1, 5)]
    for each in first:
        run.send(each)
    ranks = [run.rank_of(each, FRONTEND) for each in first]
    assert ranks == [0, 1, 0, 1]
    run.run()
    again = [request(f"again{number}", [number] * 9, max_new_tokens=2) for number in (4, 2, 1)]
    run.send(*again)
    assert [run.rank_of(each, FRONTEND) for each in again] == [1, 1, 0]
    run.run()
    assert sum(core.counters.cached_tokens for core in run.whole.cores) == 3 * 8


def test_a_prefix_draws_no_more_than_a_quarter_of_the_slots_to_its_rank() -> None:
    run = driver(2, slots=8, budget=64)
    run.send(request("first", PROMPT, max_new_tokens=1))
    run.run()
    same = [request(f"r{number}", PROMPT, **LONG) for number in range(8)]
    run.send(*same)
    assert [run.rank_of(each, FRONTEND) for each in same] == [0, 0, 0, 1, 0, 1, 0, 1]


def test_a_later_attempt_stays_with_its_rank() -> None:
    run = driver()
    run.send(*(request(f"r{number}", [number] * 5, **LONG) for number in range(1, 4)))
    for _ in range(4):
        run.step()
    run.send(request("r2", [2] * 5, attempt=1, resume=[Resume(0)], **LONG))
    assert run.rank_of(request("r2", [2]), FRONTEND) == 1
    assert len(run.whole.held()[FRONTEND].rids) == 3
    run.run()
    assert run.output["r2", 0] == run.answer(request("r2", [2] * 5, **LONG))
    run.assert_empty()


def test_aborts_and_lost_frontends_reach_all_ranks() -> None:
    run = driver()
    run.send(*(request(f"r{number}", PROMPT, **LONG) for number in range(4)))
    run.step()
    run.send(AbortReq(rid="", user_requested=True, reason="all"))
    run.run()
    assert {finish.type for finish in run.finishes.values()} == {"abort"}
    run.send(*(request(f"s{number}", PROMPT, **LONG) for number in range(4)))
    run.step()
    run.send(PeerGone(FRONTEND))
    run.run()
    run.assert_empty()


def test_a_control_request_has_one_answer() -> None:
    run = driver(adapters=2)
    run.send(request("a", PROMPT, lora=ADAPTER, **LONG), request("b", PROMPT, lora=ADAPTER, **LONG))
    run.run()
    run.send(PauseGenerationReq(id="0"), ContinueGenerationReq(id="1"), FlushCacheReq(id="2"))
    run.send(LoadLoRAAdapterReq(id="lora", adapter=ADAPTER), AdapterRead(ADAPTER, sha256="a" * 64))
    assert [(each.id, each.ok) for each in replies(run)] == [("0", True), ("1", True), ("2", True), ("lora", True)]
    assert replies(run)[2].message == "12 pages freed"
    assert {load.rank for plan in run.plans for load in plan.adapters} == {0, 1}


def test_ranks_load_other_weights_together_after_the_last_choice() -> None:
    run = driver()
    run.send(request("short", [1] * 5, max_new_tokens=3, ignore_eos=True), request("long", [2] * 5, **LONG))
    run.step()
    run.send(UpdateWeightsFromDiskReq(id="w", path="/new"), WeightsRead("/new"), request("late", PROMPT, **LONG))
    while not run.plans[-1].weights:
        run.step()
    assert {"short", "long"} == {rid for rid, _ in run.finishes}
    assert [plan.weights for plan in run.plans].count("/new") == 1
    run.run()
    assert [(each.id, each.ok) for each in replies(run)] == [("w", True)]
    assert len(run.output["late", 0]) == 12
    assert not run.whole.load().updating
    run.assert_empty()


@pytest.mark.parametrize("overlap", [0, 1])
def test_memory_is_released_and_resumed_by_all_ranks_at_once(overlap: int) -> None:
    run = driver(overlap=overlap)
    wanted = [request(f"r{number}", [number] * 5, **LONG) for number in range(3)]
    run.send(*wanted)
    for _ in range(3):
        run.step()
    run.send(ReleaseMemoryReq(id="off", tags=[MemoryTag.KV_CACHE]))
    run.run()
    assert run.whole.load().released == [MemoryTag.KV_CACHE]
    run.send(ResumeMemoryReq(id="on", tags=[MemoryTag.KV_CACHE]))
    run.run()
    assert [plan.released for plan in run.plans if plan.released is not None] == [[MemoryTag.KV_CACHE], []]
    assert [(each.id, each.ok) for each in replies(run)] == [("off", True), ("on", True)]
    assert [run.output[each.rid, 0] for each in wanted] == [run.answer(each) for each in wanted]


@pytest.mark.parametrize("overlap", [0, 1])
def test_an_exclusive_request_runs_while_no_rank_runs_another(overlap: int) -> None:
    run = driver(overlap=overlap)
    run.send(request("a", [1] * 5, **LONG))
    run.step()
    run.send(request("suspect", [2] * 5, attempt=2, hold=True, **LONG))
    run.step()
    assert [message.rid for _, message, *_ in run.others if isinstance(message, ExclusiveReady)] == ["suspect"]
    run.send(request("suspect", [2] * 5, attempt=3, alone=True, **LONG))
    suspect = run.rank_of(request("suspect", [2]), FRONTEND)
    began = len(run.plans)
    while ("suspect", 0) not in run.finishes:
        run.step()
    assert {row.slot // 4 for plan in run.plans[began:] for row in plan.rows} == {suspect}
    assert ("a", 0) not in run.finishes
    run.run()
    assert len(run.output["a", 0]) == len(run.output["suspect", 0]) == 12
    run.assert_empty()


def test_load_and_state_are_those_of_all_ranks() -> None:
    run = driver(3, pages=16)
    run.send(*(request(f"r{number}", [number] * 5, **LONG) for number in range(5)))
    run.step()
    load = run.whole.load()
    assert (load.slots_total, load.pages_total, load.page_size) == (12, 48, 4)
    assert load.running + load.queued == 5
    state = run.whole.internal_state("n", 1.0)
    assert state.load == load
    assert {row.rid for row in state.choices} == {f"r{number}" for number in range(5)}


def test_a_log_gives_the_same_plans() -> None:
    log = io.BytesIO()
    run = driver(overlap=1, pages=20)
    run.core = RecordingScheduler(run.whole, LogFile(log).record)  # type: ignore[assignment]
    for number in range(12):
        run.send(request(f"r{number}", [number] * 20, n=2))
        run.step()
    run.run()
    derived = [*replay(read_events(io.BytesIO(log.getvalue())))]
    assert sum(plan is not None for _, plan, _ in derived) > 20
    assert all(plan == again for _, plan, again in derived)


def test_parts_of_a_merged_plan_are_the_plans() -> None:
    one = Plan(
        step=7,
        pages=[PageUpdate(1, 0, [[5]])],
        copies=[PageCopy(0, 1, 2)],
        rows=[Row(1, 0, 1, sample=True), Row(1, 1, 1, sample=True)],
        draft_tokens={1: 9},
    )
    other = Plan(
        step=7,
        copies=[PageCopy(0, 1, 3, rank=2)],
        restores=[StateRestore(8, 4)],
        snapshots=[StateSnapshot(1, 2, 5)],
        rows=[Row(11, 3, 1, sample=True), Row(8, 0, 4, sample=False)],
    )
    local = Plan(
        step=7,
        copies=[PageCopy(0, 1, 3)],
        restores=[StateRestore(0, 4)],
        snapshots=[StateSnapshot(1, 2, 5)],
        rows=[Row(3, 3, 1, sample=True), Row(0, 0, 4, sample=False)],
    )
    whole = merged_plan([one, None, local], 4)
    assert [plan_of(whole, rank, 4) for rank in range(3)] == [one, Plan(step=7, rows=[]), other]
    assert [row.slot for row in whole.rows] == [1, 1, 11, 8]
    result = StepResult(step=7, token_ids=[1, 2, 3, -1], errors={2: "wrong"}, complete=[1], deferred=[2])
    assert results_of(result, [one, None, local]) == [
        StepResult(step=7, token_ids=[1, 2], complete=[1]),
        None,
        StepResult(step=7, token_ids=[3, -1], errors={0: "wrong"}, deferred=[0]),
    ]


def test_ranks_that_do_not_change_together_are_a_fault() -> None:
    with pytest.raises(ValueError, match="ranks do not change together in step 3"):
        merged_plan([Plan(step=3, weights="/new", rows=[]), Plan(step=3, rows=[])], 4)


def test_one_rank_has_the_plain_core() -> None:
    assert isinstance(core_of(CoreConfig(), small_capacity()), Scheduler)
    with pytest.raises(ValueError, match="stages 1 with several"):
        CoreConfig(attention_ranks=2, stages=2)
