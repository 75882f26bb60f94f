"""Other weights under a running core: what began goes on with those it began with, and nothing is mixed."""

import io
from typing import Any

import pytest

from tercet.protocol.messages.messages import ControlReply, PauseGenerationReq, UpdateWeightsFromDiskReq
from tercet.protocol.messages.values import LoRAAdapter, Resume, pack_ints
from tercet.scheduler.core.config import CoreConfig
from tercet.scheduler.core.events import Arrival, WeightsRead
from tercet.scheduler.core.scheduler import Scheduler
from tercet.scheduler.diagnostics.event_log import LogFile, RecordingScheduler, read_events, replay
from tercet.scheduler.testing import Driver, request, small_capacity
from tercet.scheduler.testing.fake_executor import FakeExecutor

PROMPT = [*range(1, 14)]
ORDER = UpdateWeightsFromDiskReq(id="w", path="/new")
ADAPTER = LoRAAdapter("/adapters/a", "a" * 64)


def driver(overlap: int = 0, **config: Any) -> Driver:
    shape = small_capacity(adapters=1, slots=4, pages=64)
    return Driver(shape, CoreConfig(token_budget=32, **config), overlap=overlap)


def steps(run: Driver, count: int) -> None:
    for _ in range(count):
        assert run.step()


def answer(weights: str, of: Any, output: list[int] | None = None) -> list[int]:
    """What a model of those weights alone says, after the output that is given."""
    alone = Driver(small_capacity(adapters=1), executor=FakeExecutor(small_capacity(adapters=1), weights=weights))
    given = alone.output["alone", 0] = list(output or [])
    alone.send(request("alone", PROMPT, resume=[Resume(0, pack_ints(given))], attempt=1, **of))
    alone.run()
    return alone.output["alone", 0]


def replies(run: Driver) -> list[ControlReply]:
    return [each[1] for each in run.others if isinstance(each[1], ControlReply)]


@pytest.mark.parametrize("overlap", [0, 1])
def test_running_choices_end_with_old_weights_and_waiting_ones_get_new(overlap: int) -> None:
    run = driver(overlap)
    kind: dict[str, Any] = {"max_new_tokens": 8, "ignore_eos": True}
    run.send(request("old", PROMPT, **kind))
    steps(run, 3)
    run.send(ORDER)
    run.send(request("between", PROMPT, **kind))
    steps(run, 1)
    run.send(WeightsRead("/new"), request("late", PROMPT, **kind))
    assert run.core.load().updating
    run.run()
    assert run.output["old", 0] == answer("", kind)
    assert run.output["late", 0] == answer("/new", kind)
    assert run.output["between", 0] == answer("", kind)  # it began before they were read
    assert replies(run) == [ControlReply(id="w", ok=True)]
    assert not run.core.load().updating
    run.assert_empty()


def test_there_is_something_to_do_once_the_last_old_request_has_ended() -> None:
    run = driver()
    run.send(request("old", PROMPT, max_new_tokens=3, ignore_eos=True))
    steps(run, 1)
    run.send(ORDER, WeightsRead("/new"), request("new", PROMPT, max_new_tokens=3))
    while ("old", 0) not in run.finishes:
        assert run.core.runnable
        steps(run, 1)
    assert not any(plan.weights for plan in run.plans)
    assert run.core.runnable  # or the loop would wait for a message


def test_no_prefix_and_no_adapter_is_left() -> None:
    run = driver()
    kind: dict[str, Any] = {"max_new_tokens": 4, "ignore_eos": True}
    run.send(request("a", PROMPT, lora=ADAPTER, **kind), request("b", PROMPT, **kind))
    run.run()
    assert run.core.load().pages_cached
    run.send(ORDER, WeightsRead("/new"))
    run.run()
    load = run.core.load()
    assert (load.pages_cached, load.pages_free) == (0, load.pages_total)
    run.send(request("a2", PROMPT, lora=ADAPTER, **kind), request("b2", PROMPT, **kind))
    run.run()
    assert run.output["a2", 0] == answer("/new", kind | {"lora": ADAPTER}) != run.output["a", 0]
    assert run.output["b2", 0] == answer("/new", kind) != run.output["b", 0]
    assert [bool(plan.adapters) for plan in run.plans if plan.adapters] == [True, True]


@pytest.mark.parametrize("overlap", [0, 1])
def test_paused_requests_go_on_with_the_new_weights(overlap: int) -> None:
    run = driver(overlap)
    kind: dict[str, Any] = {"max_new_tokens": 8, "ignore_eos": True}
    run.send(request("r", PROMPT, **kind), request("q", PROMPT[:3], n=2, **kind))
    steps(run, 3 + overlap)
    run.send(PauseGenerationReq(id="p"), ORDER, WeightsRead("/new"))
    run.run()
    before = run.output["r", 0].copy()
    assert 0 < len(before) < 8
    assert run.plans[-1].weights == "/new"
    assert [reply.id for reply in replies(run)] == ["p", "w"]
    run.send(PauseGenerationReq(id="p2"), source="frontend-1")
    run.core.paused_by = ""
    run.run()
    assert run.output["r", 0] == answer("/new", kind, before) != answer("", kind)
    run.assert_empty()


def test_a_request_that_resumes_is_let_in_before() -> None:
    run = driver()
    kind: dict[str, Any] = {"max_new_tokens": 6, "ignore_eos": True}
    old = answer("", kind)
    run.send(request("new", PROMPT, **kind))
    run.send(ORDER, WeightsRead("/new"))
    run.output["r", 0] = old[:2]
    run.send(request("r", PROMPT, attempt=1, resume=[Resume(0, pack_ints(old[:2]))], **kind))
    run.run()
    assert run.output["r", 0] == old
    assert run.output["new", 0] == answer("/new", kind)


def test_what_cannot_be_loaded_is_refused_and_nothing_changes() -> None:
    run = driver()
    run.send(request("r", PROMPT, max_new_tokens=4, ignore_eos=True))
    run.send(ORDER, WeightsRead("/new", "it is of another model"))
    run.run()
    assert replies(run) == [ControlReply(id="w", ok=False, message="it is of another model")]
    assert not any(plan.weights for plan in run.plans)


def test_one_order_at_a_time() -> None:
    run = driver()
    run.send(request("r", PROMPT, max_new_tokens=4, ignore_eos=True))
    steps(run, 1)
    run.send(ORDER, UpdateWeightsFromDiskReq(id="other", path="/other"), WeightsRead("/new"))
    run.send(UpdateWeightsFromDiskReq(id="again", path="/new"), WeightsRead("/new"), WeightsRead("/other"))
    run.run()
    assert [(reply.id, reply.ok) for reply in replies(run)] == [("other", False), ("w", True), ("again", True)]
    run.send(UpdateWeightsFromDiskReq(id="later", path="/other"), WeightsRead("/other"))
    run.run()
    assert [plan.weights for plan in run.plans if plan.weights] == ["/new", "/other"]


def test_a_log_with_new_weights_gives_the_same_plans_again() -> None:
    file = io.BytesIO()
    shape = small_capacity()
    core = RecordingScheduler(Scheduler(CoreConfig(token_budget=16), shape), LogFile(file).record)
    executor = FakeExecutor(shape)
    core.handle(Arrival("f", request("a", PROMPT, max_new_tokens=3, ignore_eos=True)))
    for step in range(12):
        if step == 1:
            core.handle(Arrival("f", ORDER), Arrival("", WeightsRead("/new")), Arrival("f", request("b", PROMPT)))
        if plan := core.schedule():
            core.commit(executor.submit(plan).result())
    file.seek(0)
    plans = list(replay(read_events(file)))
    assert all(logged == derived for _, logged, derived in plans)
    assert [logged.weights for _, logged, _ in plans if logged and logged.weights] == ["/new"]
