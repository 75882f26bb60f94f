"""The loop over fakes: what arrives becomes plans, what comes out is sent, full peers are waited for."""

import itertools
from collections import deque
from collections.abc import Callable, Collection
from concurrent.futures import Executor, Future
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tercet.protocol.messages.messages import (
    AbortReq,
    BatchTokenIDOutput,
    ControlReply,
    GetInternalStateReq,
    InternalState,
    Message,
    Rejected,
    UpdateWeightsFromDiskReq,
)
from tercet.protocol.messages.values import FinishType, Grammar, GrammarKind, Held, Load, Phase, Role
from tercet.protocol.node import Delivery, PeerDown
from tercet.scheduler.async_loader import AsyncLoader
from tercet.scheduler.core.config import CoreConfig
from tercet.scheduler.core.invariants import violations
from tercet.scheduler.core.plan import Plan, StepResult
from tercet.scheduler.core.scheduler import Scheduler
from tercet.scheduler.loaders import Loaders
from tercet.scheduler.loop import MOST_DELIVERIES, SchedulerLoop
from tercet.scheduler.status import StatusBoard
from tercet.scheduler.testing import FakeExecutor, request, small_capacity
from tercet.scheduler.testing.fake_executor import Done


class World:
    """Everything around a loop. Time passes by 50 ms at each look at the clock."""

    def __init__(
        self,
        overlap: int = 0,
        core: Scheduler | None = None,
        grammars: AsyncLoader[Grammar, object] | None = None,
        prepare: Callable[[], bool] = lambda: False,
        executor: FakeExecutor | None = None,
    ) -> None:
        capacity = small_capacity(grammars="some 1")
        ticks = itertools.count()
        self.core = core or Scheduler(CoreConfig(), capacity)
        self.board = StatusBoard(lambda: next(ticks) * 0.05)
        self.mail: deque[Delivery] = deque()
        self.waits: list[float | None] = []
        self.full = False
        self.sent: list[tuple[str, Message]] = []
        self.weights: list[tuple[str, int]] = []
        """Announced directories of weights, and the number of messages sent before."""
        executor = executor or FakeExecutor(capacity)
        self.loop = SchedulerLoop(
            self.core,
            executor,
            self.drain,
            self.send,
            self.board,
            lambda: next(ticks) * 0.05,
            overlap=overlap,
            loaders=Loaders(grammars=grammars, weights=executor.weights),
            prepare=prepare,
            on_weights_loaded=lambda path: self.weights.append((path, len(self.sent))),
        )

    def drain(self, wait: float | None) -> list[Delivery]:
        self.waits.append(wait)
        if wait is None and not self.mail:
            self.loop.stopping = True
        taken, self.mail = list(self.mail), deque()
        return taken

    def send(self, peer: str, message: Message, *frames: bytes) -> bool:
        if self.full:
            return False
        self.sent.append((peer, message))
        return True


@pytest.mark.parametrize("overlap", [0, 1])
def test_a_request_is_served_and_then_the_loop_sleeps(overlap: int) -> None:
    world = World(overlap)
    world.mail.append(Delivery("frontend-0", request("a", [1, 2, 3], max_new_tokens=5, ignore_eos=True)))
    world.loop.run()
    batches = [message for _, message in world.sent if isinstance(message, BatchTokenIDOutput)]
    assert sum(len(batch.token_ids) for batch in batches) == 5 * 4
    assert world.waits[0] is None
    assert world.waits[-1] is None
    assert set(world.waits[1:-1]) == {0}
    assert world.board.heartbeat("frontend-0").phase == Phase.IDLE
    assert world.board.heartbeat("frontend-0").steps == 5
    assert violations(world.core) == []


def test_a_request_has_waited_since_it_came_and_not_since_it_was_looked_at() -> None:
    world = World()
    world.mail.append(Delivery("frontend-0", request("a", [1, 2, 3], max_new_tokens=1), at=-7.0))
    world.loop.run()
    [waited] = [
        each.queue_time for _, batch in world.sent if isinstance(batch, BatchTokenIDOutput) for each in batch.openings
    ]
    assert waited is not None
    assert 7.0 < waited < 8.0


def test_an_idle_loop_prepares_a_part_at_a_time_and_work_comes_first() -> None:
    parts = [True, True, True, False]
    world = World(prepare=lambda: parts.pop(0))
    world.loop.turn()
    assert world.waits == [0]
    world.mail.append(Delivery("frontend-0", request("a", [1, 2, 3], max_new_tokens=3, ignore_eos=True)))
    world.loop.turn()
    assert len(parts) == 2, "idle still, when it looked"
    while world.core.runnable:
        world.loop.turn()
        assert len(parts) == 2
    parts.append(False)
    world.loop.run()
    assert world.waits[-1] is None
    assert parts == [False], "the rest, and then it sleeps"


def test_a_turn_handles_a_bounded_number_of_messages_in_order() -> None:
    world = World()
    many = MOST_DELIVERIES + 40
    for number in range(many):
        asked = request(f"r{number}", [1, 2, 3], max_new_tokens=2, ignore_eos=True)
        world.mail.append(Delivery("frontend-0", asked))
    world.mail.append(Delivery("frontend-0", AbortReq(rid=f"r{many - 1}", indices=[])))
    world.loop.turn()
    assert len(list(world.core.roster)) == MOST_DELIVERIES
    world.loop.run()
    batches = [message for _, message in world.sent if isinstance(message, BatchTokenIDOutput)]
    finished = {batch.rids[row]: end.type for batch in batches for row, end in batch.finishes.items()}
    assert finished.pop(f"r{many - 1}") == FinishType.ABORT, "its request came first"
    assert finished == dict.fromkeys([f"r{number}" for number in range(many - 1)], FinishType.LENGTH)


def test_heartbeats_say_what_is_held_for_whom() -> None:
    world = World()
    world.mail.append(Delivery("frontend-0", request("a", [1, 2, 3], max_new_tokens=60, ignore_eos=True)))
    for _ in range(10):
        world.loop.turn()
    assert world.board.heartbeat("frontend-0").held.rids == ["a"]
    assert world.board.heartbeat("frontend-1").held.rids == []
    assert world.board.heartbeat("frontend-1").load.running == 1


def test_a_request_for_the_state_is_answered_between_steps_and_when_idle() -> None:
    world = World()
    world.mail.append(Delivery("frontend-0", request("a", [1, 2, 3], max_new_tokens=60, ignore_eos=True)))
    world.loop.turn()
    world.mail.append(Delivery("frontend-1", GetInternalStateReq(id="s1")))
    world.loop.turn()
    world.loop.run()
    world.mail.append(Delivery("frontend-1", GetInternalStateReq(id="s2")))
    world.loop.turn()
    states = [(peer, each) for peer, each in world.sent if isinstance(each, InternalState)]
    assert [(peer, each.id, [row.rid for row in each.choices]) for peer, each in states] == [
        ("frontend-1", "s1", ["a"]),
        ("frontend-1", "s2", []),
    ]


def test_a_full_detokenizer_stops_its_requests_until_it_drains() -> None:
    world = World()
    world.mail.append(Delivery("frontend-0", request("a", [1, 2, 3], max_new_tokens=6, ignore_eos=True)))
    world.full = True
    for _ in range(5):
        world.loop.turn()
    assert world.core.counters.steps == 1
    assert world.waits[-1] == pytest.approx(0.005)
    world.full = False
    world.loop.run()
    batches = [message for _, message in world.sent if isinstance(message, BatchTokenIDOutput)]
    assert b"".join(batch.positions for batch in batches) == b"".join(n.to_bytes(4, "little") for n in range(6))


def test_a_dead_frontend_frees_its_requests() -> None:
    world = World()
    world.mail.append(Delivery("frontend-0", request("a", [1, 2, 3], max_new_tokens=60, ignore_eos=True)))
    for _ in range(3):
        world.loop.turn()
    world.mail.append(Delivery("frontend-0", PeerDown("frontend-0", Role.FRONTEND, "silence")))
    world.loop.run()
    assert list(world.core.roster) == []
    assert world.core.load().running == 0


def test_what_another_part_asked_for_is_freed_with_it() -> None:
    """No link keeps a detokenizer from asking, though none of ours does."""
    world = World()
    world.mail.append(Delivery("detokenizer-9", request("a", [1, 2, 3], max_new_tokens=60, ignore_eos=True)))
    for _ in range(3):
        world.loop.turn()
    world.mail.append(Delivery("detokenizer-9", PeerDown("detokenizer-9", Role.DETOKENIZER, "goodbye")))
    world.loop.turn()
    world.loop.turn()
    assert list(world.core.roster) == []


def test_a_draining_loop_finishes_what_it_holds_and_ends() -> None:
    world = World()
    world.mail.append(Delivery("frontend-0", request("a", [1, 2, 3], max_new_tokens=5, ignore_eos=True)))
    world.loop.turn()
    world.loop.draining = True
    world.mail.append(Delivery("frontend-0", request("b", [1, 2, 3])))
    world.loop.run()
    assert not world.loop.stopping
    assert [message.rid for _, message in world.sent if isinstance(message, Rejected)] == ["b"]
    batches = [message for _, message in world.sent if isinstance(message, BatchTokenIDOutput)]
    assert batches[-1].finishes
    assert world.board.heartbeat("frontend-0").phase == Phase.DRAINING


def test_blocked_requests_give_way_and_the_loop_then_waits() -> None:
    world = World()
    held = request("a", [1] * 100, max_new_tokens=20, ignore_eos=True)
    world.full = True
    world.mail.append(Delivery("frontend-0", held))
    world.loop.turn()
    world.loop.turn()
    world.mail.append(Delivery("frontend-0", request("b", [2] * 100, detokenizer="detokenizer-1")))
    for _ in range(5):
        world.loop.turn()
    assert world.core.counters.steps == 2
    assert world.core.counters.retractions == 1
    assert world.waits[-3:] == pytest.approx([0.005] * 3)
    assert violations(world.core) == []


class ManualExecutor(Executor):
    """Threads of which every call ends when the test sets the result of its future."""

    def __init__(self) -> None:
        self.result: Future[Any] = Future()
        self.keys: list[Grammar] = []

    def submit(self, call: Callable[..., Any], /, *given: Any, **named: Any) -> Future[Any]:
        self.keys += given
        return self.result


class Loader(AsyncLoader[Grammar, object]):
    """Loader that notes what was retained last."""

    kept: Collection[Grammar] = ()

    def retain(self, needed: Collection[Grammar]) -> None:
        self.kept = {*needed}
        super().retain(needed)


def test_a_grammar_is_compiled_before_planning_and_kept_while_in_use() -> None:
    grammar, threads = Grammar(GrammarKind.REGEX, "a*"), ManualExecutor()
    loader = Loader(lambda _: None, threads)
    world = World(grammars=loader)
    world.mail.append(Delivery("frontend-0", request("a", [1, 2], max_new_tokens=3, ignore_eos=True, grammar=grammar)))
    for _ in range(5):
        world.loop.turn()
    assert (threads.keys, loader.kept, world.core.counters.steps) == ([grammar], {grammar}, 0)
    assert world.waits[1:] == pytest.approx([0.005] * 4)
    threads.result.set_result(None)
    world.loop.run()
    assert world.core.counters.steps == 3
    assert loader.kept == set()


def test_an_invalid_grammar_is_rejected_pending_or_known() -> None:
    grammar, threads = Grammar(GrammarKind.REGEX, "a*"), ManualExecutor()
    loader = Loader(lambda _: None, threads)
    world = World(grammars=loader)
    world.mail.append(Delivery("frontend-0", request("a", [1, 2], grammar=grammar)))
    world.loop.turn()
    threads.result.set_exception(ValueError("it is bad"))
    world.loop.turn()
    world.mail.append(Delivery("frontend-0", request("b", [1, 2], grammar=grammar)))
    world.loop.run()
    refused = [message for _, message in world.sent if isinstance(message, Rejected)]
    assert [(each.rid, each.code, each.message) for each in refused] == [
        (rid, "invalid_grammar", "The grammar is refused: it is bad.") for rid in ("a", "b")
    ]
    assert (world.core.counters.steps, loader.kept) == (0, set())


class FaultyExecutor(FakeExecutor):
    """An executor that cannot load weights."""

    def submit(self, plan: Plan) -> Done:
        done = super().submit(plan)
        return Done(msgspec.structs.replace(done.value, fault="it is bad")) if plan.weights else done


@pytest.mark.parametrize("overlap", [0, 1])
@pytest.mark.parametrize("fault", ["", "it is bad"])
def test_loaded_weights_are_announced_before_the_update_is_answered(fault: str, overlap: int, tmp_path: Path) -> None:
    capacity = small_capacity(grammars="some 1")
    world = World(overlap, executor=FaultyExecutor(capacity) if fault else None)
    world.mail.append(Delivery("frontend-0", request("a", [1, 2, 3], max_new_tokens=5, ignore_eos=True)))
    world.mail.append(Delivery("frontend-0", UpdateWeightsFromDiskReq(id="w", path=str(tmp_path))))
    while not (replies := [each for _, each in world.sent if isinstance(each, ControlReply)]):
        world.loop.turn()
    assert replies == [ControlReply(id="w", ok=not fault, message=fault)]
    place = [isinstance(each, ControlReply) for _, each in world.sent].index(True)
    assert world.weights == ([] if fault else [(str(tmp_path), place)])


class Hanging:
    """A step whose result is looked at while it is awaited."""

    def __init__(self, result: StepResult, look: Callable[[], None]) -> None:
        self._result = result
        self._look = look

    def result(self) -> StepResult:
        self._look()
        return self._result


class HangingExecutor(FakeExecutor):
    """Notes how old every step was said to be when it was waited for."""

    look: Callable[[], None]

    def submit(self, plan: Plan) -> Hanging:  # type: ignore[override]
        return Hanging(super().submit(plan).result(), self.look)


@pytest.mark.parametrize("overlap", [0, 1])
def test_whatever_step_the_loop_waits_for_is_seen_to_age(overlap: int) -> None:
    world = World(overlap)
    ages: list[float] = []
    executor = HangingExecutor(small_capacity())
    executor.look = lambda: ages.append(world.board.heartbeat("frontend-0").step_age)
    world.loop._executor = executor
    world.mail.append(Delivery("frontend-0", request("a", [1, 2, 3], max_new_tokens=5, ignore_eos=True)))
    world.loop.run()
    assert len(ages) == 5
    assert min(ages) > 0


class CountingBoard(StatusBoard):
    """Counts how often the core was asked for its load."""

    reports = 0

    def publish(self, load: Load, held: dict[str, Held]) -> None:
        self.reports += 1
        super().publish(load, held)


def test_a_blocked_loop_reports_now_and_then_only() -> None:
    """Every report looks at every request: at each of two hundred retries a second it would cost a core."""
    world = World()
    board = world.loop._board = CountingBoard(lambda: 0.0)
    world.mail.append(Delivery("frontend-0", request("a", [1, 2, 3], max_new_tokens=6, ignore_eos=True)))
    world.full = True
    for _ in range(40):
        world.loop.turn()
    assert 0 < board.reports <= 25


class Hopeless(Scheduler):
    """A core that has work and never a plan."""

    runnable = True

    def schedule(self, now: float = 0.0, *, weights: bool = True) -> None:
        return None


def test_a_loop_that_can_plan_nothing_does_not_spin() -> None:
    world = World(core=Hopeless(CoreConfig(), small_capacity()))
    for _ in range(5):
        world.loop.turn()
    assert world.waits[1:] == pytest.approx([0.005] * 4)
