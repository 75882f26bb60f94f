"""Memory that is released under a running core: requests wait for it, and end as if nothing had happened."""

import io
from typing import Any

import pytest

from tercet.protocol.messages.messages import (
    ControlReply,
    MemoryReq,
    ReleaseMemoryReq,
    ResumeMemoryReq,
    UpdateWeightsFromDiskReq,
)
from tercet.protocol.messages.values import LoRAAdapter, MemoryTag
from tercet.scheduler.core.config import CoreConfig
from tercet.scheduler.core.events import Arrival, PeerGone, WeightsRead
from tercet.scheduler.core.plan import Plan, StepResult
from tercet.scheduler.core.scheduler import Scheduler
from tercet.scheduler.diagnostics.event_log import LogFile, RecordingScheduler, read_events, replay
from tercet.scheduler.testing import Driver, request, small_capacity
from tercet.scheduler.testing.driver import FRONTEND
from tercet.scheduler.testing.fake_executor import Done, FakeExecutor

PROMPT = [*range(1, 14)]
KIND: dict[str, Any] = {"max_new_tokens": 8, "ignore_eos": True}
WEIGHTS, KV_CACHE = MemoryTag.WEIGHTS, MemoryTag.KV_CACHE
ALL = [WEIGHTS, KV_CACHE]


def release(*tags: MemoryTag) -> ReleaseMemoryReq:
    return ReleaseMemoryReq(id="release", tags=[*tags])


def resume(*tags: MemoryTag) -> ResumeMemoryReq:
    return ResumeMemoryReq(id="resume", tags=[*tags])


def driver(overlap: int = 0, executor: FakeExecutor | None = None) -> Driver:
    shape = small_capacity(adapters=1, slots=4, pages=64)
    return Driver(shape, CoreConfig(token_budget=32), overlap=overlap, executor=executor)


def undisturbed(rid: str) -> list[int]:
    run = driver()
    run.send(request(rid, PROMPT, **KIND))
    run.run()
    return run.output[rid, 0]


def replies(run: Driver) -> list[tuple[str, bool, str]]:
    return [(each[1].id, each[1].ok, each[1].message) for each in run.others if isinstance(each[1], ControlReply)]


@pytest.mark.parametrize("overlap", [0, 1])
def test_requests_are_kept_and_end_as_without_a_release(overlap: int) -> None:
    run = driver(overlap)
    run.send(request("old", PROMPT, **KIND))
    for _ in range(3):
        assert run.step()
    run.send(release(*ALL))
    run.run()
    begun = len(run.output["old", 0])
    assert 0 < begun < 8
    assert replies(run) == [("release", True, "")]
    load = run.core.load()
    assert (load.released, load.pages_cached, load.running) == (sorted(ALL), 0, 0)
    run.send(request("new", PROMPT, **KIND))
    run.run()
    assert not run.core.runnable  # or the loop would not sleep
    assert ("new", 0) not in run.output
    run.send(resume(*ALL))
    run.run()
    assert run.output["old", 0] == run.output["new", 0] == undisturbed("old")
    assert not run.core.load().released
    run.assert_empty()


def test_no_step_runs_until_all_memory_is_there() -> None:
    run = driver()
    run.send(request("r", PROMPT, **KIND), release(*ALL), resume(WEIGHTS))
    run.run()
    assert run.core.load().released == [KV_CACHE]
    assert ("r", 0) not in run.output
    run.send(resume(KV_CACHE))
    run.run()
    assert [plan.released for plan in run.plans if plan.released is not None] == [sorted(ALL), [KV_CACHE], []]
    assert len(run.output["r", 0]) == 8


def test_an_adapter_is_loaded_again_after_a_release() -> None:
    run = driver()
    adapter = LoRAAdapter("/adapters/a", "a" * 64)
    for rid in ("before", "after"):
        run.send(request(rid, PROMPT, lora=adapter, **KIND))
        run.run()
        run.send(release(WEIGHTS), resume(WEIGHTS))
        run.run()
    assert run.output["before", 0] == run.output["after", 0]
    assert [len(plan.adapters) for plan in run.plans if plan.adapters] == [1, 1]


def test_weights_that_are_updated_meanwhile_need_no_resume() -> None:
    run = driver()
    run.send(request("r", PROMPT, **KIND))
    for _ in range(3):
        assert run.step()
    run.send(release(*ALL), UpdateWeightsFromDiskReq(id="w", path="/new"), WeightsRead("/new"))
    run.run()
    assert run.core.load().released == [KV_CACHE]
    run.send(resume(KV_CACHE))
    run.run()
    assert len(run.output["r", 0]) == 8
    assert run.output["r", 0] != undisturbed("r")
    assert [each[0] for each in replies(run)] == ["release", "w", "resume"]


class Full(FakeExecutor):
    """Executor that has no memory for `failures` plans that resume some."""

    failures = 0

    def submit(self, plan: Plan) -> Done:
        if plan.released == [] and self.failures:
            self.failures -= 1
            return Done(StepResult(step=plan.step, token_ids=[], fault="out of memory"))
        return super().submit(plan)


@pytest.mark.parametrize("overlap", [0, 1])
def test_memory_stays_released_if_there_is_none(overlap: int) -> None:
    executor = Full(small_capacity(adapters=1, slots=4, pages=64))
    executor.failures = 1
    run = driver(overlap, executor)
    run.send(release(*ALL), request("r", PROMPT, **KIND), resume(*ALL))
    run.run()
    assert replies(run) == [("release", True, ""), ("resume", False, "out of memory")]
    assert run.core.load().released == sorted(ALL)
    run.send(resume(*ALL))
    run.run()
    assert run.output["r", 0] == undisturbed("r")


def test_the_end_of_the_frontend_does_not_allocate_memory_again() -> None:
    """A trainer may use it: unlike a pause, a release ends by a request alone."""
    run = driver()
    run.send(release(KV_CACHE))
    run.run()
    run.send(PeerGone(FRONTEND))
    run.run()
    assert run.core.load().released == [KV_CACHE]


@pytest.mark.parametrize("order", [release(*ALL), resume(*ALL)])
def test_an_order_that_changes_nothing_is_answered(order: MemoryReq) -> None:
    run = driver()
    run.send(request("r", PROMPT, **KIND), *([order] if isinstance(order, ReleaseMemoryReq) else []))
    run.run()
    run.send(order)
    run.run()
    assert replies(run)[-1] == (order.id, True, "")


def test_a_log_with_released_memory_gives_the_same_plans_again() -> None:
    file, shape = io.BytesIO(), small_capacity()
    core, executor = (
        RecordingScheduler(Scheduler(CoreConfig(token_budget=16), shape), LogFile(file).record),
        FakeExecutor(shape),
    )
    core.handle(Arrival("f", request("a", PROMPT, **KIND)))
    orders: dict[int, MemoryReq] = {2: release(*ALL), 4: resume(*ALL)}
    for step in range(16):
        if step in orders:
            core.handle(Arrival("f", orders[step]))
        if plan := core.schedule():
            core.commit(executor.submit(plan).result())
    file.seek(0)
    plans = list(replay(read_events(file)))
    assert all(logged == derived for _, logged, derived in plans)
    assert [logged.released for _, logged, _ in plans if logged and logged.released is not None] == [sorted(ALL), []]
