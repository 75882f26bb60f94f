"""Choice of schedulers and detokenizers, and their eligibility."""

from collections.abc import Callable

import msgspec
import pytest

from tercet.frontend.manager.req_state import ReqState
from tercet.frontend.manager.request import GenerateRequest, GenerationOptions
from tercet.frontend.model.prompts import TextPrompt, TokenPrompt
from tercet.frontend.model.served_model import ModelFiles, ServedModel
from tercet.frontend.routing.dispatcher import Dispatcher
from tercet.frontend.routing.peers import PeerRegistry
from tercet.frontend.routing.policies import LeastLoaded, RoundRobin, RoutingPolicy
from tercet.frontend.routing.request_state import SingleWaiterEvent
from tercet.frontend.testing import FakeEngine, managed
from tercet.protocol.messages.messages import Heartbeat, Ready, TokenizedGenerateReqInput
from tercet.protocol.messages.values import (
    Grammar,
    GrammarKind,
    Load,
    ModelIdentity,
    ModelLimits,
    Phase,
    Role,
    SamplingParams,
)

EngineOf = Callable[..., FakeEngine]

DIGITS = Grammar(GrammarKind.REGEX, "[0-9]+")
REQUEST = GenerateRequest(model="tiny", prompt=TokenPrompt([1, 2, 3]), options=GenerationOptions(max_tokens=4))


def sent(engine: FakeEngine) -> list[tuple[str, int, Grammar | None]]:
    """Return the target, attempt and grammar of each dispatch."""
    return [
        (peer, message.attempt, message.sampling.grammar)
        for peer, message in engine.sent
        if isinstance(message, TokenizedGenerateReqInput)
    ]


async def test_only_readers_get_grammars_at_first_and_again(engine_of: EngineOf, limits: ModelLimits) -> None:
    engine = engine_of(limits=msgspec.structs.replace(limits, grammars=""))
    async with managed(engine) as manager:
        engine.limits = limits
        engine.scheduler_up("reader")
        constrained = msgspec.structs.replace(REQUEST, grammar=DIGITS)
        generation = await manager.submit([constrained])
        assert sent(engine) == [("reader", 0, DIGITS)]
        engine.step()
        engine.down("reader")
        engine.step()
        manager.tick()
        assert sent(engine)[1:] == []
        assert manager.waiting == 1
        engine.scheduler_up("reader", "2")
        assert sent(engine)[1:] == [("reader", 1, DIGITS)]
        manager.release(generation)


async def test_without_a_grammar_every_scheduler_serves(engine_of: EngineOf, limits: ModelLimits) -> None:
    engine = engine_of(limits=msgspec.structs.replace(limits, grammars=""))
    async with managed(engine) as manager:
        manager.release(await manager.submit([REQUEST]))
        assert sent(engine) == [("scheduler-0", 0, None)]
        assert manager.grammars.pids == []


@pytest.fixture
def state(files: dict[str, bytes], limits: ModelLimits) -> ReqState:
    model = ServedModel("tiny", ModelFiles(files), limits, ModelIdentity(weights="w"))
    sampling = SamplingParams(max_new_tokens=1)
    request = GenerateRequest(model="tiny", prompt=TextPrompt("x"))
    return ReqState("r", request, model, [1], sampling, SingleWaiterEvent())


DispatcherOf = Callable[[RoutingPolicy], Dispatcher]


@pytest.fixture
def dispatcher_of(engine_of: EngineOf, limits: ModelLimits) -> DispatcherOf:
    """Create dispatchers to three schedulers and two detokenizers."""

    def make(policy: RoutingPolicy) -> Dispatcher:
        dispatcher = Dispatcher(engine_of(), policy)
        for number in range(3):
            dispatcher.peers.add(f"s{number}", Role.SCHEDULER, "1")
            dispatcher.peers.scheduler_ready(f"s{number}", Ready(limits=limits, identity=ModelIdentity(weights="w")))
        for number in range(2):
            dispatcher.peers.add(f"d{number}", Role.DETOKENIZER, "1")
            dispatcher.peers.detokenizer_ready(f"d{number}")
        return dispatcher

    return make


def tried(dispatcher: Dispatcher, state: ReqState) -> list[str]:
    return [each.peer for each in dispatcher.candidates(state)]


def test_round_robin_visits_all(dispatcher_of: DispatcherOf, engine_of: EngineOf, state: ReqState) -> None:
    dispatcher = dispatcher_of(RoundRobin())
    assert [tried(dispatcher, state)[0] for _ in range(6)] == ["s0", "s1", "s2", "s0", "s1", "s2"]
    assert tried(Dispatcher(engine_of(), RoundRobin()), state) == []


def test_every_scheduler_is_tried_in_the_end(dispatcher_of: DispatcherOf, state: ReqState) -> None:
    assert sorted(tried(dispatcher_of(RoundRobin()), state)) == ["s0", "s1", "s2"]


def test_least_loaded_reads_heartbeats_and_equals_take_turns(dispatcher_of: DispatcherOf, state: ReqState) -> None:
    dispatcher = dispatcher_of(LeastLoaded())
    dispatcher.peers.heartbeat("s0", Heartbeat(phase=Phase.STEP, load=Load(queued_tokens=5, running_tokens=5)))
    assert {tried(dispatcher, state)[0] for _ in range(4)} == {"s1", "s2"}
    assert tried(dispatcher, state)[-1] == "s0"


def test_a_request_stays_where_it_runs_and_avoids_where_it_was_refused(
    dispatcher_of: DispatcherOf, state: ReqState
) -> None:
    dispatcher = dispatcher_of(RoundRobin())
    state.scheduler, state.refused_by = "s1", {"s0"}
    for _ in range(3):
        order = tried(dispatcher, state)
        assert (order[0], order[-1]) == ("s1", "s0")


def test_detokenizers_take_turns(dispatcher_of: DispatcherOf, engine_of: EngineOf) -> None:
    dispatcher = dispatcher_of(RoundRobin())
    chosen = [dispatcher.next_detokenizer() for _ in range(3)]
    assert [each.peer for each in chosen if each] == ["d0", "d1", "d0"]
    assert Dispatcher(engine_of(), RoundRobin()).next_detokenizer() is None


def test_only_ready_schedulers_of_the_same_weights_are_eligible(limits: ModelLimits) -> None:
    fleet = PeerRegistry()
    for peer in ("ready", "other", "loading", "leaving"):
        assert fleet.add(peer, Role.SCHEDULER, "1")
    assert not fleet.add("ready", Role.SCHEDULER, "1")
    assert not fleet.add("f", Role.FRONTEND, "1")
    assert fleet.scheduler_ready("ready", Ready(limits=limits, identity=ModelIdentity(weights="w")))
    assert fleet.scheduler_ready("leaving", Ready(limits=limits, identity=ModelIdentity(weights="w")))
    assert fleet.scheduler_ready("other", Ready(limits=limits, identity=ModelIdentity(weights="v")))
    assert not fleet.scheduler_ready("loading", Ready())
    assert not fleet.scheduler_ready("unknown", Ready(limits=limits, identity=ModelIdentity(weights="w")))
    fleet.heartbeat("leaving", Heartbeat(phase=Phase.DRAINING))
    assert [each.peer for each in fleet.eligible_schedulers("w")] == ["ready"]
    fleet.remove("ready")
    assert fleet.eligible_schedulers("w") == []


def test_only_ready_detokenizers_are_eligible() -> None:
    fleet = PeerRegistry()
    fleet.add("d", Role.DETOKENIZER, "1")
    assert fleet.eligible_detokenizers() == []
    fleet.detokenizer_ready("d")
    assert [each.peer for each in fleet.eligible_detokenizers()] == ["d"]
