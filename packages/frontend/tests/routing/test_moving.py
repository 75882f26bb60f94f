"""Requests wait without an eligible scheduler, and move away from draining peers."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from tercet.frontend.errors import ServerError, UnavailableError
from tercet.frontend.manager.request_table import RequestTable
from tercet.frontend.manager.tokenizer_manager import TokenizerManager
from tercet.frontend.routing.dispatcher import Dispatcher
from tercet.frontend.routing.model_registry import ModelRegistry
from tercet.frontend.routing.policies import RoundRobin
from tercet.frontend.testing import DETOKENIZER, FakeEngine, Token, managed, received_choices, submit
from tercet.protocol.membership.events import Delivery
from tercet.protocol.messages.messages import AbortReq, Heartbeat, Rejected, TokenizedGenerateReqInput
from tercet.protocol.messages.values import Phase, Role, unpack_ints
from tercet.protocol.testing import ScriptedClock

EngineOf = Callable[..., FakeEngine]
S = "scheduler-0"
WHOLE = "0 1 2 3 4 "


def script(request: TokenizedGenerateReqInput, index: int) -> list[Token]:
    return [Token(place, f"{place} ") for place in range(5)]


def accept(request: TokenizedGenerateReqInput) -> None:
    pass


def drain(engine: FakeEngine, peer: str) -> None:
    engine.deliver([Delivery(peer, Heartbeat(phase=Phase.DRAINING))])


async def test_new_requests_wait_for_a_scheduler_up_to_a_bound(engine_of: EngineOf) -> None:
    engine = engine_of(script)
    async with managed(engine, max_waiting=2) as manager:
        engine.down(S)
        waiting = [await submit(manager) for _ in range(2)]
        with pytest.raises(UnavailableError) as refused:
            await submit(manager)
        assert refused.value.headers() == {"retry-after": "1"}
        assert (manager.running, manager.waiting) == (2, 2)
        engine.scheduler_up(S, "2")
        for _ in range(6):
            engine.step()
        assert [text for each in waiting for text, _, _ in received_choices(each)] == [WHOLE] * 2
        assert [request.attempt for request in engine.requests()] == [0, 0]


async def test_what_waited_too_long_is_unavailable_and_what_had_begun_has_failed(engine_of: EngineOf) -> None:
    engine, clock = engine_of(script), ScriptedClock()
    async with managed(engine, recovery_timeout=60, clock=clock) as manager:
        begun = await submit(manager)
        engine.step()
        engine.down(S)
        new = await submit(manager)
        clock.advance(59)
        manager.tick()
        assert not begun.states[0].done
        clock.advance(2)
        manager.tick()
        assert isinstance(begun.states[0].error, ServerError)
        assert isinstance(new.states[0].error, UnavailableError)
        assert new.states[0].error.headers() == {"retry-after": "1"}
        assert manager.waiting == 0


async def test_requests_of_a_scheduler_that_leaves_move_to_another(engine_of: EngineOf) -> None:
    engine = engine_of(script, schedulers=[S, "scheduler-1"])
    async with managed(engine) as manager:
        generation = await submit(manager)
        [state] = generation.states
        old = state.scheduler
        engine.step()
        drain(engine, old)
        drain(engine, old)
        assert (state.attempt, state.scheduler != old) == (1, True)
        assert [peer for peer, message in engine.sent if isinstance(message, AbortReq)] == [old]
        assert [list(unpack_ints(each.output_ids)) for each in engine.requests()[-1].resume] == [[0]]
        for _ in range(3):
            assert (await submit(manager)).states[0].scheduler != old
        for _ in range(6):
            engine.step()
        assert received_choices(generation)[0][0] == WHOLE


async def test_a_lone_draining_scheduler_finishes_and_new_requests_wait(
    engine_of: EngineOf,
) -> None:
    engine = engine_of(script)
    async with managed(engine) as manager:
        held = await submit(manager)
        drain(engine, S)
        assert not manager.ready
        new = await submit(manager)
        for _ in range(6):
            engine.step()
        assert received_choices(held)[0][0] == WHOLE
        assert (len(engine.requests()), new.states[0].attempt) == (1, -1)
        assert [each.lost_at for each in held.states[0].dispatches] == [None]
        engine.down(S)
        engine.scheduler_up(S, "2")
        for _ in range(6):
            engine.step()
        assert received_choices(new)[0][0] == WHOLE


async def test_what_is_refused_by_a_scheduler_that_leaves_waits_for_the_next(engine_of: EngineOf) -> None:
    engine = engine_of(script)
    async with managed(engine) as manager:
        engine.reject = lambda request: Rejected(
            rid=request.rid, attempt=request.attempt, code="draining", message="leaving", retry=True
        )
        generation = await submit(manager)
        await asyncio.sleep(0.01)
        manager.tick()
        assert len(engine.requests()) == 1
        assert not generation.states[0].done
        engine.reject = accept
        engine.down(S)
        engine.scheduler_up(S, "2")
        assert [(request.attempt, request.resume) for request in engine.requests()] == [(0, []), (1, [])]
        assert [each.cause for each in generation.states[0].dispatches] == ["", "refused"]
        for _ in range(6):
            engine.step()
        assert received_choices(generation)[0][0] == WHOLE


async def test_a_full_scheduler_turns_new_requests_away(engine_of: EngineOf) -> None:
    engine = engine_of(script)
    async with managed(engine) as manager:
        engine.reject = lambda request: Rejected(
            rid=request.rid, attempt=request.attempt, code="overloaded", message="full", retry=True
        )
        generation = await submit(manager)
        await asyncio.sleep(0.01)
        error = generation.states[0].error
        assert isinstance(error, UnavailableError)
        assert (error.status, error.code, error.headers()) == (503, "overloaded", {"retry-after": "1"})


async def test_what_a_scheduler_has_to_do_is_known_from_dispatch_to_end(engine_of: EngineOf) -> None:
    engine = engine_of(script, schedulers=[S, "scheduler-1"])
    async with managed(engine) as manager:
        loads = manager.fleet.schedulers
        first, second = await submit(manager, prompt=30), await submit(manager, prompt=20)
        assert (loads[S].own_tokens, loads["scheduler-1"].own_tokens) == (30, 20)
        engine.step()
        drain(engine, S)
        assert (loads[S].own_tokens, loads["scheduler-1"].own_tokens) == (0, 51)
        manager.release(first)
        manager.release(first)
        assert loads["scheduler-1"].own_tokens == 20
        engine.reject = lambda request: Rejected(
            rid=request.rid, attempt=request.attempt, code="overloaded", message="full", retry=True
        )
        await submit(manager, prompt=40)
        assert loads["scheduler-1"].own_tokens == 60
        await asyncio.sleep(0.01)
        assert loads["scheduler-1"].own_tokens == 20
        manager.release(second)
        assert loads["scheduler-1"].own_tokens == 0


async def test_requests_of_a_leaving_detokenizer_keep_their_scheduler(engine_of: EngineOf) -> None:
    engine = engine_of(script, schedulers=[S, "scheduler-1"])
    async with managed(engine) as manager:
        generation = await submit(manager)
        [state] = generation.states
        scheduler = state.scheduler
        engine.step()
        drain(engine, DETOKENIZER)
        assert (state.attempt, state.detokenizer) == (0, DETOKENIZER)
        engine.detokenizer_up("detokenizer-1")
        drain(engine, DETOKENIZER)
        assert (state.attempt, state.detokenizer, state.scheduler) == (1, "detokenizer-1", scheduler)
        assert engine.aborts() == []
        engine.down(DETOKENIZER, Role.DETOKENIZER)
        for _ in range(6):
            engine.step()
        assert received_choices(generation)[0][0] == WHOLE


async def test_a_silent_way_is_given_up_for_another_detokenizer(engine_of: EngineOf) -> None:
    engine, clock = engine_of(script), ScriptedClock()
    async with managed(engine, clock=clock) as manager:
        engine.detokenizer_up("detokenizer-1")
        generation = await submit(manager)
        [state] = generation.states
        silent = state.detokenizer
        for _ in range(4):
            clock.advance(0.25)
            engine.deliver([Delivery(S, Heartbeat(phase=Phase.IDLE))])
        assert (state.attempt, state.detokenizer != silent) == (1, True)
        assert manager.counters.redispatches == {"absent": 1}


async def test_where_nothing_comes_from_another_scheduler_is_tried(engine_of: EngineOf) -> None:
    """Simulates one scheduler of two that cannot reach a detokenizer."""
    engine, clock = engine_of(script, schedulers=[S, "scheduler-1"], auto=False), ScriptedClock()
    async with managed(engine, clock=clock) as manager:
        generation = await submit(manager)
        [state] = generation.states
        first = state.scheduler
        for _ in range(100):
            if state.scheduler != first:
                break
            clock.advance(0.25)
            engine.deliver([Delivery(each, Heartbeat(phase=Phase.IDLE)) for each in engine.schedulers])
        assert (state.scheduler != first, state.attempt) == (True, 3)
        for _ in range(6):
            engine.step()
        assert [text for text, _, _ in received_choices(generation)] == ["0 1 2 3 4 "]


async def test_what_nothing_is_heard_of_by_any_way_is_ended_in_the_end(engine_of: EngineOf) -> None:
    """Simulates schedulers that cannot reach detokenizers while all heartbeats look healthy."""
    engine, clock = engine_of(script), ScriptedClock()
    async with managed(engine, clock=clock, recovery_timeout=60.0) as manager:
        generation = await submit(manager)
        [state] = generation.states
        for _ in range(2000):
            if state.done:
                break
            clock.advance(0.25)
            engine.deliver([Delivery(S, Heartbeat(phase=Phase.IDLE))])
        assert isinstance(state.error, UnavailableError)
        assert 60 <= clock() - state.started_at < 180


async def test_it_is_told_once_when_requests_can_be_served(engine_of: EngineOf) -> None:
    engine, told = engine_of(script), asyncio.Event()
    times = 0

    def tell() -> None:
        nonlocal times
        times += 1
        told.set()

    with ThreadPoolExecutor(1) as pool:
        requests = RequestTable("f", Dispatcher(engine, RoundRobin()))
        manager = TokenizerManager(engine, ModelRegistry(pool), requests)
        manager.start(tell)
        engine.deliver = manager.on_deliveries
        engine.scheduler_up(S)
        async with asyncio.timeout(10):
            while not list(manager.models):  # noqa: ASYNC110 - the files are read in a thread
                await asyncio.sleep(0.001)
        assert (times, manager.ready) == (0, False)
        engine.detokenizer_up(DETOKENIZER)
        assert (times, manager.ready) == (1, True)
        engine.down(S)
        engine.scheduler_up(S, "2")
        assert times == 1
        await manager.close()


async def test_files_that_come_last_make_it_servable(engine_of: EngineOf) -> None:
    engine, told = engine_of(script), asyncio.Event()
    with ThreadPoolExecutor(1) as pool:
        requests = RequestTable("f", Dispatcher(engine, RoundRobin()))
        manager = TokenizerManager(engine, ModelRegistry(pool), requests)
        manager.start(told.set)
        engine.deliver = manager.on_deliveries
        engine.connect()
        assert not told.is_set()
        async with asyncio.timeout(10):
            await told.wait()
        assert manager.ready
        await manager.close()


async def test_one_that_leaves_is_not_ready(engine_of: EngineOf) -> None:
    engine = engine_of(script)
    async with managed(engine) as manager:
        assert manager.ready
        manager.drain(0)
        assert not manager.ready
        with pytest.raises(UnavailableError, match="leaving"):
            await submit(manager)
