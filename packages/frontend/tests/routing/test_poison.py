"""A request that crashes schedulers costs three crashes, and no other request its answer."""

import asyncio
from collections.abc import Callable

import openai
import pytest

from tercet.frontend.errors import ServerError
from tercet.frontend.manager.req_state import Generation
from tercet.frontend.manager.tokenizer_manager import TokenizerManager
from tercet.frontend.routing.poison import MAX_CRASHES, OFFER_TIMEOUT, fingerprint
from tercet.frontend.testing import DETOKENIZER, FakeEngine, Token, managed, received_choices, serving, submit
from tercet.protocol.membership.events import Delivery, PeerDown
from tercet.protocol.messages.messages import Heartbeat, TokenizedGenerateReqInput
from tercet.protocol.messages.values import Phase, Role
from tercet.protocol.testing import ScriptedClock

EngineOf = Callable[..., FakeEngine]
S = "scheduler-0"
POISON = 5
"""Prompt length that marks the poisonous request."""


def script(request: TokenizedGenerateReqInput, index: int) -> list[Token]:
    return [Token(place, f"{place} ") for place in range(4)]


class World:
    """Scheduler that crashes in the step with the poisonous request; exclusive requests run alone."""

    def __init__(self, engine: FakeEngine, manager: TokenizerManager) -> None:
        self.engine = engine
        self.manager = manager
        self.deaths = 0

    def run(self, steps: int = 60) -> None:
        for _ in range(steps):
            self.engine.offer()
            alone = [each for each in self.engine.running if each.request.exclusive]
            if self.engine.running and self._is_poison(alone[0] if alone else None):
                self.die()
            elif alone:
                others = self.engine.running
                self.engine.running = alone[:1]
                self.engine.step()
                self.engine.running += [each for each in others if each is not alone[0]]
            else:
                self.engine.step()

    def _is_poison(self, alone: object) -> bool:
        runs = [each for each in self.engine.running if alone is None or each is alone]
        return any(len(each.request.input_ids) == 4 * POISON for each in runs)

    def die(self) -> None:
        self.deaths += 1
        self.engine.down(S)
        self.engine.scheduler_up(S, f"again-{self.deaths}")
        self.engine.offer()


def error(generation: Generation) -> Exception | None:
    return generation.states[0].error


async def test_the_third_death_ends_the_poison_and_all_others_finish(
    engine_of: EngineOf, caplog: pytest.LogCaptureFixture
) -> None:
    engine = engine_of(script)
    async with managed(engine) as manager:
        world = World(engine, manager)
        before = [await submit(manager) for _ in range(2)]
        engine.step()
        poison = await submit(manager, prompt=POISON)
        after = [await submit(manager) for _ in range(3)]
        world.run()
        assert world.deaths == 3
        assert isinstance(error(poison), ServerError)
        assert [text for each in before + after for text, _, _ in received_choices(each)] == ["0 1 2 3 "] * 5
        [logged] = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
        assert fingerprint(poison.states[0]) in logged
        assert manager.counters.deaths == {Role.SCHEDULER: 3}


async def test_clients_do_not_send_the_poison_again(
    engine_of: EngineOf, openai_of: Callable[..., openai.AsyncOpenAI]
) -> None:
    engine = engine_of(script, auto=False)
    async with serving(engine) as served:
        world = World(engine, served.manager)
        client = openai_of(served, max_retries=2)
        asked = asyncio.create_task(client.completions.create(model="tiny", prompt=[7] * POISON))
        async with asyncio.timeout(10):
            while not asked.done():
                world.run(1)
                await asyncio.sleep(0.002)
        with pytest.raises(openai.InternalServerError, match="repeatedly"):
            await asked
    assert world.deaths == 3


async def test_one_suspect_at_a_time_runs_alone(engine_of: EngineOf) -> None:
    engine = engine_of(script)
    async with managed(engine) as manager:
        world = World(engine, manager)
        generations = [await submit(manager) for _ in range(3)]
        for _ in range(2):
            world.die()
        assert [each.request.exclusive for each in engine.running] == [True]
        engine.step()
        engine.offer()
        assert [each.request.exclusive for each in engine.running] == [True, True]
        world.run()
        assert [text for each in generations for text, _, _ in received_choices(each)] == ["0 1 2 3 "] * 3


async def test_a_token_clears_of_suspicion(engine_of: EngineOf) -> None:
    engine = engine_of(script)
    async with managed(engine) as manager:
        world = World(engine, manager)
        generation = await submit(manager)
        for _ in range(4):
            world.die()
            if world.deaths < 2:
                continue
            engine.step()
        engine.step()
        assert not engine.requests()[-1].exclusive
        world.run(5)
        assert [text for text, _, _ in received_choices(generation)] == ["0 1 2 3 "]


async def test_what_was_only_held_is_not_to_blame(engine_of: EngineOf) -> None:
    """Another frontend's request crashed the scheduler. Without any offer the number of crashes is limited, too."""
    engine = engine_of(script)
    async with managed(engine) as manager:
        generation = await submit(manager)
        for number in range(MAX_CRASHES):
            assert error(generation) is None
            engine.down(S)
            engine.scheduler_up(S, f"{number}")
        assert isinstance(error(generation), ServerError)


async def test_whoever_waits_in_line_has_all_the_time_once_the_turn_has_come(engine_of: EngineOf) -> None:
    engine, clock = engine_of(script), ScriptedClock()
    async with managed(engine, clock=clock, recovery_timeout=60.0) as manager:
        generations = [await submit(manager) for _ in range(2)]
        for number in range(2):
            engine.down(S)
            engine.scheduler_up(S, f"{number}")
        for _ in range(70):  # the first takes that long
            clock.advance(1.0)
            manager.tick()
        engine.offer()
        engine.down(S)
        clock.advance(1.0)
        manager.tick()
        assert sorted(type(error(each)).__name__ for each in generations) == ["DeadlyRequestError", "NoneType"]
        engine.scheduler_up(S, "2")
        for _ in range(6):
            engine.step()
        assert sorted(text for each in generations for text, _, _ in received_choices(each)) == ["", "0 1 2 3 "]


async def test_an_offer_that_got_lost_is_asked_for_again(engine_of: EngineOf) -> None:
    engine, clock = engine_of(script), ScriptedClock()
    async with managed(engine, clock=clock) as manager:
        generation = await submit(manager)
        for number in range(2):
            engine.down(S)
            engine.scheduler_up(S, f"{number}")
        engine.held.clear()
        for _ in range(3):
            clock.advance(OFFER_TIMEOUT)
            manager.tick()
        assert [request.deferred for request in engine.requests()] == [False, False, True, True, True, True]
        engine.full = {S}
        engine.offer()
        engine.full = set()
        assert engine.requests()[-1].deferred
        clock.advance(OFFER_TIMEOUT)
        manager.tick()
        engine.offer()
        assert not engine.requests()[-1].deferred
        for _ in range(5):
            engine.step()
        assert [text for text, _, _ in received_choices(generation)] == ["0 1 2 3 "]
        assert len(engine.requests()) == 8


@pytest.mark.parametrize("how", ["heartbeat", "goodbye"])
async def test_a_scheduler_that_left_on_purpose_died_of_nobody(engine_of: EngineOf, how: str) -> None:
    engine = engine_of(script)
    async with managed(engine) as manager:
        generation = await submit(manager)
        for number in range(4):
            if how == "heartbeat":
                engine.deliver([Delivery(S, Heartbeat(phase=Phase.DRAINING))])
            engine.running.clear()
            reason = "goodbye: stopped" if how == "goodbye" else "its connection broke"
            engine.deliver([Delivery(S, PeerDown(S, Role.SCHEDULER, reason))])
            engine.scheduler_up(S, f"{number}")
        assert generation.states[0].crash_count == 0
        assert manager.counters.deaths == {}


async def test_a_scheduler_that_says_that_it_failed_has_died(engine_of: EngineOf) -> None:
    engine = engine_of(script)
    async with managed(engine) as manager:
        generation = await submit(manager)
        engine.deliver([Delivery(S, PeerDown(S, Role.SCHEDULER, "goodbye: failed"))])
        assert generation.states[0].crash_count == 1
        assert manager.counters.deaths == {Role.SCHEDULER: 1}


async def test_a_dead_detokenizer_makes_nobody_suspect(engine_of: EngineOf) -> None:
    engine = engine_of(script)
    async with managed(engine) as manager:
        generation = await submit(manager)
        for number in range(4):
            engine.down(DETOKENIZER, Role.DETOKENIZER)
            engine.detokenizer_up(DETOKENIZER, f"again-{number}")
        assert generation.states[0].crash_count == 0


async def test_a_stuck_step_counts_once_and_its_scheduler_is_not_asked(engine_of: EngineOf) -> None:
    engine, clock = engine_of(script, schedulers=[S, "scheduler-1"]), ScriptedClock()
    async with managed(engine, clock=clock) as manager:
        generation = await submit(manager)
        stuck_at = generation.states[0].scheduler
        stuck = Heartbeat(phase=Phase.STEP, steps=5, step_age=31.0, longest_step=0.1)
        for _ in range(3):
            clock.advance(0.25)
            engine.deliver([Delivery(stuck_at, stuck)])
        assert (generation.states[0].crash_count, generation.states[0].attempt) == (1, 1)
        assert generation.states[0].scheduler != stuck_at
        assert [each.peer for each in manager.fleet.eligible_schedulers("weights-1")] != [stuck_at]
        slow = Heartbeat(phase=Phase.STEP, steps=6, step_age=31.0, longest_step=31.5)
        engine.deliver([Delivery(stuck_at, slow)])
        assert len(manager.fleet.eligible_schedulers("weights-1")) == 2
        await asyncio.sleep(0)


async def test_the_only_scheduler_being_stuck_and_then_killed_is_one_death(engine_of: EngineOf) -> None:
    engine = engine_of(script)
    async with managed(engine) as manager:
        generation = await submit(manager)
        engine.deliver([Delivery(S, Heartbeat(phase=Phase.STEP, step_age=31.0))])
        engine.down(S)
        engine.scheduler_up(S, "2")
        assert (generation.states[0].crash_count, generation.states[0].attempt) == (1, 1)


def test_fingerprints_are_of_ids_and_sampling_and_not_of_seeds(engine_of: EngineOf) -> None:
    async def scenario() -> list[str]:
        engine = engine_of(script)
        async with managed(engine) as manager:
            lengths = [(3, 50), (3, 50), (4, 50), (3, 40)]
            generations = [await submit(manager, prompt=size, max_tokens=limit) for size, limit in lengths]
            return [fingerprint(each.states[0]) for each in generations]

    same, again, longer, shorter = asyncio.run(scenario())
    assert same == again
    assert len({same, longer, shorter}) == 3
    assert len(same) == 16
