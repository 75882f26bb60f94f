"""Heartbeats compared with requests: two must agree, and early ones are ignored."""

from collections.abc import Callable

import msgspec
import pytest

from tercet.frontend.manager.req_state import OutputRow, ReqState
from tercet.frontend.manager.request import GenerateRequest
from tercet.frontend.model.prompts import TextPrompt
from tercet.frontend.model.served_model import ModelFiles, ServedModel
from tercet.frontend.routing.dispatcher import Cause
from tercet.frontend.routing.reconciliation import Findings, Reconciler
from tercet.frontend.routing.request_state import SingleWaiterEvent
from tercet.protocol.messages.messages import AbortReq, Heartbeat
from tercet.protocol.messages.values import (
    FinishReason,
    FinishType,
    Held,
    ModelIdentity,
    ModelLimits,
    Phase,
    SamplingParams,
    pack_ints,
)

S = "scheduler-0"
Make = Callable[..., ReqState]


@pytest.fixture
def make(files: dict[str, bytes], limits: ModelLimits) -> Make:
    """Create a request of two choices, dispatched at time 0."""
    model = ServedModel("tiny", ModelFiles(files), limits, ModelIdentity(weights="w"))

    def request(rid: str = "r", scheduler: str = S) -> ReqState:
        sampling = SamplingParams(max_new_tokens=9, n=2)
        request = GenerateRequest(model="tiny", prompt=TextPrompt("x"))
        state = ReqState(rid, request, model, [1], sampling, SingleWaiterEvent())
        state.dispatched(scheduler, "detokenizer-0", 0.0)
        return state

    return request


def heartbeat(*held: tuple[str, int, int, int], steps: int = 0, idle: bool = True, age: float = 0.0) -> Heartbeat:
    """Create a heartbeat that lists (rid, index, attempt, next position)."""
    columns = list(zip(*held, strict=True)) or [(), (), (), ()]
    rids, *numbers = columns
    indices, attempts, positions = map(pack_ints, numbers)
    table = Held(rids=list(rids), indices=indices, attempts=attempts, positions=positions)
    return Heartbeat(phase=Phase.IDLE if idle else Phase.STEP, steps=steps, step_age=age, held=table)


BOTH = ("r", 0, 0, 0), ("r", 1, 0, 0)


class Script:
    """Heartbeats of one scheduler, 0.25 s apart."""

    def __init__(self, *states: ReqState) -> None:
        self.states = {state.rid: state for state in states}
        self.reconciler = Reconciler()
        self.now = 0.0

    def hear(self, heartbeat: Heartbeat, after: float = 0.25) -> tuple[list[tuple[str, Cause]], list[AbortReq]]:
        self.now += after
        findings = self.reconciler.scheduler(S, heartbeat, self.states, self.now)
        return [(state.rid, cause) for state, cause in findings.lost], findings.orphans


NOTHING: tuple[list[tuple[str, Cause]], list[AbortReq]] = ([], [])


def test_what_is_held_as_believed_is_left_alone(make: Make) -> None:
    script = Script(make())
    for _ in range(10):
        assert script.hear(heartbeat(*BOTH)) == NOTHING


def test_what_two_heartbeats_lack_is_lost_and_one_is_not_enough(make: Make) -> None:
    script = Script(make())
    assert script.hear(heartbeat()) == NOTHING  # too soon after the dispatch
    assert script.hear(heartbeat()) == NOTHING
    assert script.hear(heartbeat(*BOTH)) == NOTHING
    assert script.hear(heartbeat()) == NOTHING
    assert script.hear(heartbeat()) == ([("r", Cause.ABSENT)], [])


def test_one_missing_choice_is_enough(make: Make) -> None:
    script = Script(make())
    lacking = [script.hear(heartbeat(BOTH[0])) for _ in range(3)]
    assert lacking == [NOTHING, NOTHING, ([("r", Cause.ABSENT)], [])]


def test_an_earlier_attempt_is_not_the_present_one(make: Make) -> None:
    state = make()
    state.dispatched(S, "detokenizer-0", 0.0)
    script = Script(state)
    found = [script.hear(heartbeat(*BOTH)) for _ in range(3)]
    assert found[-1] == ([("r", Cause.ABSENT)], [])


def test_heartbeats_that_come_together_count_once(make: Make) -> None:
    script = Script(make())
    script.hear(heartbeat(), after=1.0)
    for _ in range(5):
        assert script.hear(heartbeat(), after=0.01) == NOTHING
    assert script.hear(heartbeat()) == ([("r", Cause.ABSENT)], [])


def test_a_scheduler_that_compiles_has_not_looked_into_its_inbox(make: Make) -> None:
    script = Script(make())
    for _ in range(8):
        assert script.hear(msgspec.structs.replace(heartbeat(steps=7), phase=Phase.COMPILING)) == NOTHING
    assert script.hear(heartbeat(steps=7)) == NOTHING
    assert script.hear(heartbeat(steps=7)) == ([("r", Cause.ABSENT)], [])


def test_a_long_step_cannot_know_what_came_while_it_ran(make: Make) -> None:
    script = Script(make())
    for age in range(20):
        assert script.hear(heartbeat(steps=7, idle=False, age=age / 4)) == NOTHING
    assert script.hear(heartbeat(steps=8, idle=False, age=0.1)) == NOTHING
    assert script.hear(heartbeat(steps=9, idle=False, age=0.1)) == NOTHING
    assert script.hear(heartbeat(steps=9, idle=False, age=0.3)) == ([("r", Cause.ABSENT)], [])


def test_a_scheduler_ahead_while_nothing_arrives_has_lost_something(make: Make) -> None:
    script = Script(make())
    ahead = heartbeat(("r", 0, 0, 3), ("r", 1, 0, 0), idle=False, age=0.2)
    assert [script.hear(ahead) for _ in range(3)] == [NOTHING, NOTHING, ([("r", Cause.SILENT)], [])]


def test_whatever_arrives_is_a_reason_to_wait(make: Make) -> None:
    state = make()
    script = Script(state)
    for position in range(8):
        ahead = heartbeat(("r", 0, 0, position + 2), ("r", 1, 0, 0))
        assert script.hear(ahead) == NOTHING
        state.accept(OutputRow(0, 0, position, [5]))


def test_each_fruitless_try_waits_twice_as_long(make: Make) -> None:
    state = make()
    script = Script(state)
    waits = []
    for attempt in range(3):
        state.dispatched_at = script.now
        for count in range(1, 50):
            if script.hear(heartbeat())[0]:
                waits.append(count)
                state.retries += 1
                state.dispatched(S, "detokenizer-0", script.now)
                break
        assert state.attempt == attempt + 1
    assert waits == [3, 5, 9]
    state.accept(OutputRow(0, state.attempt, 0, [5]))
    assert state.retries == 0


def test_what_nobody_waits_for_is_called_off_after_two_heartbeats(make: Make) -> None:
    finished, elsewhere = make("done"), make("away", "scheduler-1")
    finished.accept(OutputRow(1, 0, 0, [5]))
    script = Script(finished, elsewhere)
    held = heartbeat(("gone", 0, 0, 4), ("gone", 3, 0, 4), ("away", 0, 0, 0), ("done", 0, 0, 0), ("done", 1, 0, 1))
    assert script.hear(held) == NOTHING
    assert script.hear(heartbeat(("new", 0, 0, 0), ("gone", 0, 0, 5), ("done", 0, 0, 0), ("done", 1, 0, 1))) == (
        [],
        [AbortReq(rid="gone", indices=[0], reason="nobody waits for it")],
    )


def test_orphans_of_a_detokenizer_are_aborted_after_two_heartbeats(make: Make) -> None:
    here, finished, elsewhere = make("here"), make("done"), make("away")
    finished.accept(OutputRow(1, 0, 0, [5], finish=FinishReason(FinishType.LENGTH)))
    elsewhere.detokenizer = "another"
    states = {state.rid: state for state in (here, finished, elsewhere)}
    reconciler, peer = Reconciler(), here.detokenizer
    first = heartbeat(("here", 0, 0, 7), ("done", 0, 0, 1), ("done", 1, 0, 1), ("away", 0, 0, 0), ("gone", 0, 0, 4))
    then = heartbeat(("here", 0, 0, 9), ("done", 1, 0, 1), ("gone", 0, 0, 4), ("new", 0, 0, 0))
    assert reconciler.detokenizer(peer, first, states, 1.0) == Findings()
    assert reconciler.detokenizer(peer, first, states, 1.1) == Findings()  # too soon after the last counted one
    findings = reconciler.detokenizer(peer, then, states, 1.25)
    assert findings.lost == []
    assert [(abort.rid, abort.indices) for abort in findings.orphans] == [("done", [1]), ("gone", [0])]


def test_requests_elsewhere_and_ended_ones_are_not_looked_for(make: Make) -> None:
    elsewhere, waiting = make("away", "scheduler-1"), make("waits", "")
    script = Script(elsewhere, waiting)
    assert [script.hear(heartbeat()) for _ in range(4)] == [NOTHING] * 4


def test_a_table_that_makes_no_sense_is_refused(make: Make) -> None:
    with pytest.raises(ValueError, match="shorter"):
        Script(make()).hear(Heartbeat(phase=Phase.IDLE, held=Held(rids=["r"])))
