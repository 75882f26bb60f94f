"""Peers die at any moment, and every answer stays the same."""

import asyncio
from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from tercet.frontend.errors import ServerError
from tercet.frontend.testing import DETOKENIZER, FakeEngine, Token, managed, received_choices, submit
from tercet.protocol.membership.events import Delivery
from tercet.protocol.messages.messages import AbortReq, Heartbeat, Rejected, TokenizedGenerateReqInput
from tercet.protocol.messages.values import FinishReason, FinishType, Phase, Role, unpack_ints

EngineOf = Callable[..., FakeEngine]


def counting_script(request: TokenizedGenerateReqInput, index: int) -> list[Token]:
    """Create a script in which each choice counts in its own hundred."""
    return [Token(100 * index + place % 90, f"{index}:{place} ") for place in range(6 + index)]


def expected(n: int) -> list[tuple[str, list[int], FinishReason | None]]:
    stop = FinishReason(FinishType.STOP, 0)
    return [
        (
            "".join(f"{index}:{place} " for place in range(6 + index)),
            [100 * index + place for place in range(6 + index)],
            stop,
        )
        for index in range(n)
    ]


def run_to_end(engine: FakeEngine) -> None:
    for _ in range(20):
        engine.step()


async def test_nothing_dies(engine_of: EngineOf) -> None:
    engine = engine_of(counting_script)
    async with managed(engine) as manager:
        generation = await submit(manager, n=2)
        run_to_end(engine)
        assert received_choices(generation) == expected(2)


async def test_a_dead_schedulers_request_goes_on_at_its_next_position(engine_of: EngineOf) -> None:
    engine = engine_of(counting_script, schedulers=["scheduler-0", "scheduler-1"])
    async with managed(engine) as manager:
        generation = await submit(manager, n=2)
        engine.step()
        engine.step()
        engine.down("scheduler-0")
        again = engine.requests()[-1]
        assert (engine.sent[-1][0], again.attempt) == ("scheduler-1", 1)
        assert [list(unpack_ints(each.output_ids)) for each in again.resume] == [[0, 1], [100, 101]]
        run_to_end(engine)
        assert received_choices(generation) == expected(2)


async def test_only_open_choices_are_resumed(engine_of: EngineOf) -> None:
    engine = engine_of(counting_script, schedulers=["scheduler-0", "scheduler-1"])
    async with managed(engine) as manager:
        generation = await submit(manager, n=2)
        for _ in range(6):
            engine.step()
        engine.down("scheduler-0")
        assert [each.index for each in engine.requests()[-1].resume] == [1]
        run_to_end(engine)
        assert received_choices(generation) == expected(2)


async def test_a_request_waits_for_its_restarted_scheduler(engine_of: EngineOf) -> None:
    engine = engine_of(counting_script)
    async with managed(engine) as manager:
        generation = await submit(manager)
        engine.step()
        engine.down("scheduler-0")
        assert len(engine.requests()) == 1
        engine.scheduler_up("scheduler-0", "2")
        assert engine.requests()[-1].attempt == 1
        run_to_end(engine)
        assert received_choices(generation) == expected(1)


async def test_a_new_start_of_a_peer_means_that_the_old_one_is_dead(engine_of: EngineOf) -> None:
    engine = engine_of(counting_script)
    async with managed(engine) as manager:
        generation = await submit(manager)
        engine.step()
        engine.running.clear()
        engine.scheduler_up("scheduler-0", "2")
        assert engine.requests()[-1].attempt == 1
        run_to_end(engine)
        assert received_choices(generation) == expected(1)


async def test_a_dead_detokenizers_request_stays_with_its_scheduler(engine_of: EngineOf) -> None:
    engine = engine_of(counting_script, schedulers=["scheduler-0", "scheduler-1"])
    async with managed(engine) as manager:
        generation = await submit(manager)
        first = engine.sent[-1][0]
        engine.step()
        engine.detokenizer_up("detokenizer-1")
        engine.down(DETOKENIZER, Role.DETOKENIZER)
        again = engine.requests()[-1]
        assert (engine.sent[-1][0], again.attempt, again.detokenizer) == (first, 1, "detokenizer-1")
        assert engine.aborts() == []
        run_to_end(engine)
        assert received_choices(generation) == expected(1)


async def test_a_scheduler_that_a_request_leaves_behind_is_told(engine_of: EngineOf) -> None:
    engine = engine_of(counting_script, schedulers=["scheduler-0", "scheduler-1"])
    async with managed(engine) as manager:
        generation = await submit(manager)
        engine.step()
        engine.deliver([Delivery("scheduler-0", Heartbeat(phase=Phase.DRAINING))])
        engine.detokenizer_up("detokenizer-1")
        engine.down(DETOKENIZER, Role.DETOKENIZER)
        assert [peer for peer, message in engine.sent if isinstance(message, AbortReq)] == ["scheduler-0"]
        run_to_end(engine)
        assert received_choices(generation) == expected(1)


async def test_a_restarted_scheduler_is_asked_for_its_files_again(engine_of: EngineOf) -> None:
    engine = engine_of(counting_script)
    async with managed(engine) as manager:
        engine.down("scheduler-0")
        assert manager.models.peers == set()
        engine.weights, engine.files = "weights-2", {"tokenizer.json": engine.files["tokenizer.json"]}
        engine.scheduler_up("scheduler-0", "2")
        assert manager.models.get("tiny").files.template is not None
        async with asyncio.timeout(10):
            while manager.models.get("tiny").identity.weights != "weights-2":  # noqa: ASYNC110 - read in a thread
                await asyncio.sleep(0.001)
        assert manager.models.get("tiny").files.template is None


async def test_without_any_other_detokenizer_the_request_waits(engine_of: EngineOf) -> None:
    engine = engine_of(counting_script)
    async with managed(engine) as manager:
        generation = await submit(manager)
        engine.step()
        engine.down(DETOKENIZER, Role.DETOKENIZER)
        assert len(engine.requests()) == 1
        engine.detokenizer_up(DETOKENIZER, "2")
        run_to_end(engine)
        assert received_choices(generation) == expected(1)


async def test_a_scheduler_of_other_weights_does_not_take_over(engine_of: EngineOf) -> None:
    engine = engine_of(counting_script)
    async with managed(engine) as manager:
        await submit(manager)
        engine.step()
        engine.weights = "weights-2"
        engine.scheduler_up("scheduler-1")
        engine.down("scheduler-0")
        assert len(engine.requests()) == 1


async def test_a_request_that_finds_nobody_ends_in_an_error(engine_of: EngineOf) -> None:
    engine = engine_of(counting_script)
    async with managed(engine, recovery_timeout=0.0) as manager:
        generation = await submit(manager)
        engine.step()
        engine.down("scheduler-0")
        arrivals = generation.arrivals()
        assert [each.update.text for each in await anext(arrivals)] == ["0:0 "]
        async with asyncio.timeout(5):
            with pytest.raises(ServerError):
                await anext(arrivals)


async def test_a_lost_message_is_noticed_and_made_up_for(engine_of: EngineOf) -> None:
    engine = engine_of(counting_script)
    async with managed(engine) as manager:
        generation = await submit(manager)
        engine.step()
        engine.step(lost=True)
        engine.step()
        assert engine.requests()[-1].attempt == 1
        run_to_end(engine)
        assert received_choices(generation) == expected(1)


async def test_a_released_request_is_not_dispatched_again(engine_of: EngineOf) -> None:
    engine = engine_of(counting_script, schedulers=["scheduler-0", "scheduler-1"])
    async with managed(engine) as manager:
        generation = await submit(manager)
        engine.step()
        manager.release(generation)
        manager.release(generation)
        assert [each.rid for each in engine.aborts()] == [generation.states[0].rid]
        engine.down("scheduler-0")
        assert len(engine.requests()) == 1
        assert manager.running == 0


async def test_a_waiting_request_is_forgotten_with_its_client(engine_of: EngineOf) -> None:
    engine = engine_of(counting_script)
    async with managed(engine) as manager:
        generation = await submit(manager)
        engine.down("scheduler-0")
        manager.release(generation)
        engine.scheduler_up("scheduler-0", "2")
        assert len(engine.requests()) == 1


async def test_a_finish_that_the_scheduler_does_not_know_is_told_to_it(engine_of: EngineOf) -> None:
    def stops(request: TokenizedGenerateReqInput, index: int) -> list[Token]:
        finish = FinishReason(FinishType.STOP, "END") if index else None
        return [Token(1, "a", finish), Token(2, "b"), Token(3, "c")]

    engine = engine_of(stops)
    async with managed(engine) as manager:
        generation = await submit(manager, n=2)
        run_to_end(engine)
        [state] = generation.states
        assert engine.aborts() == [AbortReq(rid=state.rid, indices=[1], reason="stop string")]
        assert [text for text, _, _ in received_choices(generation)] == ["abc", "a"]


async def test_a_refusal_that_allows_it_is_taken_elsewhere(engine_of: EngineOf) -> None:
    engine = engine_of(counting_script, schedulers=["scheduler-0", "scheduler-1"])
    refused: list[str] = []

    def once(request: TokenizedGenerateReqInput) -> Rejected | None:
        if refused:
            return None
        refused.append(request.rid)
        return Rejected(rid=request.rid, attempt=request.attempt, code="overloaded", message="full", retry=True)

    engine.reject = once
    async with managed(engine) as manager:
        generation = await submit(manager)
        first = engine.sent[-1][0]
        await asyncio.sleep(0)
        assert engine.sent[-1][0] != first
        run_to_end(engine)
        assert received_choices(generation) == expected(1)


actions = st.lists(
    st.sampled_from(["step", "step", "step", "kill", "kill detokenizer", "restart", "lose"]), max_size=25
)


@given(actions=actions, n=st.integers(1, 3))
@example(actions=["kill", "restart", "kill", "restart", "step", "lose", "step", "kill"], n=1)
@example(actions=["kill", "restart", "kill", "restart", "step", "lose", "step", "restart", "kill"], n=1)
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_whatever_dies_whenever_no_token_is_lost_or_repeated(engine_of: EngineOf, actions: list[str], n: int) -> None:
    async def scenario() -> None:
        engine = engine_of(counting_script, schedulers=["scheduler-0", "scheduler-1"])
        incarnation = 1
        async with managed(engine) as manager:
            generation = await submit(manager, n=n)
            for action in actions:
                match action:
                    case "step":
                        engine.step()
                    case "kill" if engine.schedulers and generation.states[0].crash_count < 2:
                        engine.down(engine.schedulers[0])
                    case "kill detokenizer":
                        engine.down(DETOKENIZER, Role.DETOKENIZER)
                        incarnation += 1
                        engine.detokenizer_up(DETOKENIZER, str(incarnation))
                    case "restart":
                        incarnation += 1
                        for peer in {"scheduler-0", "scheduler-1"} - set(engine.schedulers):
                            engine.scheduler_up(peer, str(incarnation))
                    case "lose":
                        engine.step(lost=True)
            for peer in {"scheduler-0", "scheduler-1"} - set(engine.schedulers):
                engine.scheduler_up(peer, f"last-{incarnation}")
            incarnation += 1
            engine.down(DETOKENIZER, Role.DETOKENIZER)
            engine.detokenizer_up(DETOKENIZER, str(incarnation))
            run_to_end(engine)
            assert received_choices(generation) == expected(n)

    asyncio.run(scenario())
