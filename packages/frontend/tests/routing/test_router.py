"""Selection of schedulers, and their eligibility."""

import pytest

from tercet.frontend.manager.req_state import ReqState
from tercet.frontend.manager.request import GenerateRequest
from tercet.frontend.model.prompts import TextPrompt
from tercet.frontend.model.served_model import ModelFiles, ServedModel
from tercet.frontend.routing.peers import DetokenizerPeer, PeerRegistry, SchedulerPeer
from tercet.frontend.routing.policies import LeastLoaded, RoundRobin
from tercet.frontend.routing.router import DataParallelController
from tercet.frontend.routing.single_waiter_event import SingleWaiterEvent
from tercet.protocol.messages.messages import Heartbeat, Ready
from tercet.protocol.messages.values import Load, ModelIdentity, ModelLimits, Phase, Role, SamplingParams


@pytest.fixture
def state(files: dict[str, bytes], limits: ModelLimits) -> ReqState:
    model = ServedModel("tiny", ModelFiles(files), limits, ModelIdentity(weights="w"))
    sampling = SamplingParams(max_new_tokens=1)
    request = GenerateRequest(model="tiny", prompt=TextPrompt("x"), sampling=sampling)
    return ReqState("r", request, model, [1], sampling, SingleWaiterEvent())


def peers(count: int) -> list[SchedulerPeer]:
    return [SchedulerPeer(f"s{number}", "1") for number in range(count)]


def test_round_robin_visits_all(state: ReqState) -> None:
    controller, schedulers = DataParallelController(RoundRobin()), peers(3)
    firsts = [controller.schedulers(state, schedulers)[0].peer for _ in range(6)]
    assert firsts == ["s0", "s1", "s2", "s0", "s1", "s2"]
    assert controller.schedulers(state, []) == []


def test_every_scheduler_is_tried_in_the_end(state: ReqState) -> None:
    order = DataParallelController(RoundRobin()).schedulers(state, peers(3))
    assert sorted(each.peer for each in order) == ["s0", "s1", "s2"]


def test_least_loaded_reads_heartbeats_and_equals_take_turns(state: ReqState) -> None:
    controller, schedulers = DataParallelController(LeastLoaded()), peers(3)
    schedulers[0].heartbeat = Heartbeat(phase=Phase.STEP, load=Load(queued_tokens=5, running_tokens=5))
    firsts = {controller.schedulers(state, schedulers)[0].peer for _ in range(4)}
    assert firsts == {"s1", "s2"}
    assert controller.schedulers(state, schedulers)[-1].peer == "s0"


def test_a_request_stays_where_it_runs_and_avoids_where_it_was_refused(state: ReqState) -> None:
    controller, schedulers = DataParallelController(RoundRobin()), peers(3)
    state.scheduler, state.refused_by = "s1", {"s0"}
    for _ in range(3):
        order = [each.peer for each in controller.schedulers(state, schedulers)]
        assert (order[0], order[-1]) == ("s1", "s0")


def test_detokenizers_take_turns() -> None:
    controller = DataParallelController(RoundRobin())
    detokenizers = [DetokenizerPeer(f"d{number}", "1", has_tokenizer=True) for number in range(2)]
    chosen = [controller.detokenizer(detokenizers) for _ in range(3)]
    assert [each.peer for each in chosen if each] == ["d0", "d1", "d0"]
    assert controller.detokenizer([]) is None


def test_only_ready_schedulers_of_the_same_weights_are_eligible(limits: ModelLimits) -> None:
    registry = PeerRegistry()
    for peer in ("ready", "other", "loading", "leaving"):
        assert registry.add(peer, Role.SCHEDULER, "1")
    assert not registry.add("ready", Role.SCHEDULER, "1")
    assert not registry.add("f", Role.FRONTEND, "1")
    assert registry.scheduler_ready("ready", Ready(limits=limits, identity=ModelIdentity(weights="w")))
    assert registry.scheduler_ready("leaving", Ready(limits=limits, identity=ModelIdentity(weights="w")))
    assert registry.scheduler_ready("other", Ready(limits=limits, identity=ModelIdentity(weights="v")))
    assert not registry.scheduler_ready("loading", Ready())
    assert not registry.scheduler_ready("unknown", Ready(limits=limits, identity=ModelIdentity(weights="w")))
    registry.heartbeat("leaving", Heartbeat(phase=Phase.DRAINING))
    assert [each.peer for each in registry.eligible_schedulers("w")] == ["ready"]
    registry.remove("ready")
    assert registry.eligible_schedulers("w") == []


def test_only_ready_detokenizers_are_eligible() -> None:
    registry = PeerRegistry()
    registry.add("d", Role.DETOKENIZER, "1")
    assert registry.eligible_detokenizers() == []
    registry.detokenizer_ready("d")
    assert [each.peer for each in registry.eligible_detokenizers()] == ["d"]
