"""Requests with adapters: read before they are planned, at few places, and apart in the prefix cache."""

import io
from collections.abc import Iterator
from typing import Any

import pytest

from tercet.protocol.messages.messages import ControlReply, LoadLoRAAdapterReq, UnloadLoRAAdapterReq
from tercet.protocol.messages.values import FinishType, LoRAAdapter, Resume, pack_ints
from tercet.scheduler.core.config import CoreConfig
from tercet.scheduler.core.events import AdapterPending, AdapterRead, Arrival, PeerBlocked, PeerGone
from tercet.scheduler.core.request import Req
from tercet.scheduler.core.scheduler import Scheduler
from tercet.scheduler.diagnostics.event_log import LogFile, RecordingScheduler, read_events, replay
from tercet.scheduler.testing import Driver, request, small_capacity

A, B, C = (LoRAAdapter(f"/adapters/{name}", name * 64) for name in "abc")
PROMPT = [*range(1, 14)]


def driver(adapters: int = 2, *, overlap: int = 0, slots: int = 8, **config: Any) -> Driver:
    shape = small_capacity(adapters=adapters, slots=slots, pages=64)
    return Driver(shape, CoreConfig(token_budget=32, **config), overlap=overlap)


def loads(run: Driver) -> list[list[tuple[int, LoRAAdapter]]]:
    return [[(load.place, load.adapter) for load in plan.adapters] for plan in run.plans]


@pytest.mark.parametrize("overlap", [0, 1])
def test_each_request_is_answered_by_its_own_adapter(overlap: int) -> None:
    run = driver(overlap=overlap)
    wanted = [
        request(f"r{number}", PROMPT, lora=lora, ignore_eos=True) for number, lora in enumerate((A, None, B, A, None))
    ]
    run.send(*wanted)
    run.run()
    answers = [run.output[each.rid, 0] for each in wanted]
    assert answers == [run.answer(each) for each in wanted]
    assert answers[0] == answers[3] != answers[1] == answers[4] != answers[2] != answers[0]
    assert sorted(load for loaded in loads(run) for load in loaded) == [(0, A), (1, B)]
    run.assert_empty()


def test_an_adapter_stays_at_its_place_until_another_needs_it() -> None:
    run = driver(adapters=1)
    for rid, lora in (("a", A), ("again", A), ("b", B), ("back", A)):
        run.send(request(rid, PROMPT, lora=lora, max_new_tokens=2, ignore_eos=True))
        run.run()
    assert [loaded for loaded in loads(run) if loaded] == [[(0, A)], [(0, B)], [(0, A)]]


def test_the_least_recently_used_one_makes_room() -> None:
    run = driver(adapters=2)
    for rid, lora in (("1", A), ("2", B), ("3", A), ("4", C)):
        run.send(request(rid, PROMPT, lora=lora, max_new_tokens=2, ignore_eos=True))
        run.run()
    assert [loaded for loaded in loads(run) if loaded] == [[(0, A)], [(1, B)], [(1, C)]]


def test_who_finds_no_place_waits_and_others_go_by() -> None:
    run = driver(adapters=1)
    run.send(request("a", PROMPT, lora=A, max_new_tokens=6, ignore_eos=True))
    run.step()
    run.send(request("b", PROMPT, lora=B), request("plain", PROMPT, max_new_tokens=2, ignore_eos=True))
    run.step()
    assert {req.rid for req in run.core.planner.running} == {"a", "plain"}
    run.run()
    assert run.output["b", 0] == run.answer(request("b", PROMPT, lora=B))
    run.assert_empty()


@pytest.mark.parametrize("resumed", [False, True])
def test_nobody_is_passed_over_for_ever(*, resumed: bool) -> None:
    """As long as somebody new comes with the adapter that is at hand, nobody else would find a place."""
    run = driver(adapters=1, max_skips=3, slots=2)
    run.send(request("a0", PROMPT, lora=A, max_new_tokens=8, ignore_eos=True))
    run.step()
    resume = [Resume(0)] if resumed else []
    run.send(request("b", PROMPT, lora=B, max_new_tokens=2, ignore_eos=True, resume=resume))
    for number in range(1, 20):
        run.send(request(f"a{number}", PROMPT, lora=A, max_new_tokens=8, ignore_eos=True))
        run.step()
        run.step()
    assert ("b", 0) in run.finishes
    run.run()
    run.assert_empty()


def test_prefixes_of_two_adapters_are_strangers() -> None:
    run = driver()
    for rid, lora in (("plain", None), ("a", A), ("b", B), ("again", A)):
        run.send(request(rid, PROMPT, lora=lora, max_new_tokens=2, ignore_eos=True))
        run.run()
    counts = [sum(row.count for row in plan.rows) for plan in run.plans if plan.introduce]
    assert counts == [13, 13, 13, 1]


def test_choices_of_one_request_share_their_prompt() -> None:
    run = driver()
    run.send(request("a", PROMPT, lora=A, n=3, ignore_eos=True))
    run.run()
    for index in range(3):
        assert run.output["a", index] == run.answer(request("a", PROMPT, lora=A, ignore_eos=True), index)
    assert run.core.counters.forks == 2
    run.assert_empty()


def test_an_adapter_that_is_being_read_keeps_its_requests_waiting() -> None:
    run = driver()
    run.send(request("a", PROMPT, lora=A, ignore_eos=True), AdapterPending(A), request("b", PROMPT, lora=B))
    run.step()
    assert [req.rid for req in run.core.planner.running] == ["b"]
    run.run()
    assert not run.core.runnable
    assert run.core.adapters() == {A}
    run.send(AdapterRead(A, "", A.sha256))
    run.run()
    assert len(run.output["a", 0]) == 16
    assert run.core.adapters() == set()


def test_an_adapter_that_cannot_be_read_is_a_refusal() -> None:
    run = driver()
    run.send(request("a", PROMPT, lora=A), request("b", PROMPT, lora=B), AdapterPending(A))
    run.send(AdapterRead(A, "it has no weights"))
    run.run()
    refused = run.rejected["a"]
    assert (refused.code, refused.message, refused.retry) == (
        "invalid_lora",
        "The adapter is refused: it has no weights.",
        True,
    )
    assert ("b", 0) in run.finishes
    run.assert_empty()


def test_a_scheduler_without_places_refuses_adapters() -> None:
    run = driver(adapters=0)
    run.send(request("a", PROMPT, lora=A), LoadLoRAAdapterReq(id="l", adapter=A))
    run.send(UnloadLoRAAdapterReq(id="u", adapter=A))
    assert (run.rejected["a"].code, run.rejected["a"].retry) == ("invalid_lora", True)
    why = "this scheduler runs no adapters"
    assert [outgoing[1] for outgoing in run.others] == [
        ControlReply(id=number, ok=False, message=why) for number in ("l", "u")
    ]


@pytest.mark.parametrize(
    "lora",
    [LoRAAdapter("", "a" * 64), LoRAAdapter("x" * 4097, "a" * 64), LoRAAdapter("/a"), LoRAAdapter("/a", "A" * 64)],
)
def test_an_adapter_that_can_be_none_is_refused(lora: LoRAAdapter) -> None:
    run = driver()
    run.send(request("a", PROMPT, lora=lora))
    assert run.rejected["a"].code == "invalid_request"


def test_whoever_asks_for_an_adapter_is_told_when_it_is_read() -> None:
    run = driver()
    unread = LoRAAdapter("/adapters/a")
    run.send(LoadLoRAAdapterReq(id="1", adapter=unread), AdapterPending(unread), source="frontend-1")
    run.send(LoadLoRAAdapterReq(id="2", adapter=unread))
    run.send(LoadLoRAAdapterReq(id="3", adapter=unread), source="frontend-2")
    run.send(PeerGone("frontend-2"))
    assert run.core.adapters() == {unread}
    assert run.others == []
    run.send(AdapterRead(unread, "", "0f" * 32))
    assert run.others == [
        ("frontend-1", ControlReply(id="1", ok=True, sha256="0f" * 32)),
        ("frontend-0", ControlReply(id="2", ok=True, sha256="0f" * 32)),
    ]
    assert run.core.adapters() == set()


def test_whoever_asks_for_an_adapter_is_told_why_it_cannot_be_read() -> None:
    run = driver()
    run.send(LoadLoRAAdapterReq(id="1", adapter=A), AdapterRead(A, "it is damaged"))
    assert run.others == [("frontend-0", ControlReply(id="1", ok=False, message="it is damaged"))]


@pytest.mark.parametrize(("later", "kept"), [(A, True), (B, False), (None, False)])
def test_a_later_attempt_goes_on_only_with_the_same_adapter(later: LoRAAdapter | None, kept: bool) -> None:
    run = driver()
    run.send(request("a", PROMPT, lora=A, ignore_eos=True))
    run.step()
    begun = next(iter(run.core.roster))
    resume = [Resume(0, pack_ints(run.output["a", 0]))]
    run.send(request("a", PROMPT, lora=later, attempt=1, resume=resume, ignore_eos=True))
    assert (next(req for req in run.core.roster if req.finish is None) is begun) == kept
    run.run()
    assert run.finishes["a", 0].type == FinishType.LENGTH


def test_a_schedule_with_adapters_can_be_derived_again() -> None:
    log = io.BytesIO()
    shape = small_capacity(adapters=1)
    core = RecordingScheduler(Scheduler(CoreConfig(token_budget=8), shape), LogFile(log).record)
    run = Driver(shape)
    core.handle(
        Arrival("f", request("a", PROMPT, lora=A, max_new_tokens=2, ignore_eos=True)),
        Arrival("", AdapterPending(A)),
        Arrival("f", request("b", PROMPT, lora=B, max_new_tokens=2, ignore_eos=True)),
        Arrival("", AdapterRead(A, "", A.sha256)),
    )
    while plan := core.schedule():
        core.commit(run.executor.submit(plan).result())
    assert core.adapters() == set()
    log.seek(0)
    replayed = list(replay(read_events(log)))
    assert len(replayed) > 5
    assert all(logged == derived for _, logged, derived in replayed)


def test_a_blocked_choice_yields_before_one_that_is_starved() -> None:
    """The starved one would then wait for its adapter, which is read again."""
    config = CoreConfig(token_budget=32, reserve=0.0, reserve_floor=0.0)
    run = Driver(small_capacity(adapters=1, pages=8), config)
    wanted = request("a", [1, 2], lora=A, max_new_tokens=28, ignore_eos=True)
    run.send(request("b", PROMPT, max_new_tokens=14, ignore_eos=True, detokenizer="other"), wanted)
    for _ in range(4):
        run.step()
    run.send(PeerBlocked("other"), AdapterPending(A))
    run.run()
    assert run.output["a", 0] == run.answer(wanted)
    assert [req.rid for req in run.core.waiting] == ["b"]


class Counted(dict[Req, None]):
    """Running choices, and how often somebody went through them."""

    times = 0

    def __iter__(self) -> Iterator[Req]:
        self.times += 1
        return super().__iter__()


def test_nobody_goes_through_all_that_run_for_each_that_waits_for_a_place() -> None:
    run = driver(1)
    run.send(request("a", PROMPT, lora=A, ignore_eos=True))
    run.step()
    run.send(*(request(f"r{number}", PROMPT, lora=B) for number in range(200)))
    running = run.core.planner.running = Counted(run.core.planner.running)
    assert run.core.schedule() is not None
    assert running.times < 20
