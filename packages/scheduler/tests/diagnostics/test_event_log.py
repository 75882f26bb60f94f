import io
import random
from collections import deque
from typing import TYPE_CHECKING

import pytest

from tercet.protocol.messages.messages import PauseGenerationReq
from tercet.scheduler.core.config import CoreConfig
from tercet.scheduler.core.events import Arrival, PeerBlocked, PeerDrained
from tercet.scheduler.core.plan import Row
from tercet.scheduler.core.scheduler import Scheduler
from tercet.scheduler.diagnostics.event_log import (
    Handled,
    LogFile,
    RecordingScheduler,
    Scheduled,
    Started,
    read_events,
    replay,
)
from tercet.scheduler.testing import Done, FakeExecutor, request, small_capacity

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer


def recorded(overlap: int) -> bytes:
    chance = random.Random(overlap)
    capacity = small_capacity(pages=14)
    log = io.BytesIO()
    core = RecordingScheduler(Scheduler(CoreConfig(token_budget=12), capacity), LogFile(log).record)
    executor = FakeExecutor(capacity)
    in_flight: deque[Done] = deque()
    for number in range(30):
        prompt = [chance.randrange(1, 50) for _ in range(chance.randrange(1, 30))]
        core.handle(Arrival("frontend-0", request(f"r{number}", prompt, n=chance.choice([1, 2]))))
        for _ in range(8 if number < 29 else 2000):
            if plan := core.schedule():
                in_flight.append(executor.submit(plan))
            if in_flight and (plan is None or len(in_flight) > overlap):
                core.commit(in_flight.popleft().result())
    return log.getvalue()


def test_every_plan_of_a_log_comes_out_the_same() -> None:
    for overlap in (0, 1):
        answers = list(replay(read_events(io.BytesIO(recorded(overlap)))))
        assert sum(logged is not None for _, logged, _ in answers) > 100
        assert all(logged == derived for _, logged, derived in answers)


def test_times_are_logged_and_a_log_without_them_is_read() -> None:
    log = io.BytesIO()
    core = RecordingScheduler(Scheduler(CoreConfig(), small_capacity()), LogFile(log).record)
    core.handle(Arrival("frontend-0", PauseGenerationReq(id="p"), 1.5))
    core.schedule(2.5)
    text = log.getvalue()
    assert [*read_events(io.BytesIO(text))][1:] == [
        Handled([Arrival("frontend-0", PauseGenerationReq(id="p"), 1.5)]),
        Scheduled(None, 2.5),
    ]
    older = text.replace(b",1.5]", b"]").replace(b',"now":2.5', b"")
    assert [*read_events(io.BytesIO(older))][1:] == [
        Handled([Arrival("frontend-0", PauseGenerationReq(id="p"))]),
        Scheduled(None),
    ]


def test_an_empty_answer_is_logged_once_for_each_question() -> None:
    log = io.BytesIO()
    core = RecordingScheduler(Scheduler(CoreConfig(), small_capacity()), LogFile(log).record)
    core.schedule()
    core.schedule()
    core.handle(Arrival("frontend-0", PauseGenerationReq(id="p")))
    core.schedule()
    core.schedule()
    kinds = [type(event) for event in read_events(io.BytesIO(log.getvalue()))]
    assert kinds == [Started, Scheduled, Handled, Scheduled]


def test_asking_again_while_a_peer_takes_nothing_changes_nothing() -> None:
    """The loop does so every few milliseconds, and the log does not say how often."""
    log, capacity, peer = io.BytesIO(), small_capacity(), "detokenizer-0"
    inner = Scheduler(CoreConfig(draft_rows=8), capacity)
    core, executor, said = RecordingScheduler(inner, LogFile(log).record), FakeExecutor(capacity), [1, 2, 3]
    for _ in range(40):
        said.append(executor.next_token(said))
    predicted = [token if place % 3 == 0 else (token + 1) % 50 for place, token in enumerate(said[3:])]
    core.handle(Arrival("f", request("a", said[:3], max_new_tokens=40, ignore_eos=True, prediction=predicted)))
    asked = 0
    while not core.empty:
        if any(req.drafting.pause > 2 for req in inner.roster):  # steps for which nothing is guessed
            core.handle(Arrival(peer, PeerBlocked(peer)))
            assert not any(core.schedule() for _ in range(9))
            asked += 1
            core.handle(Arrival(peer, PeerDrained(peer)))
        if plan := core.schedule():
            core.commit(executor.submit(plan).result())
    assert asked
    assert all(logged == derived for _, logged, derived in replay(read_events(io.BytesIO(log.getvalue()))))


def test_a_changed_plan_is_noticed() -> None:
    events = list(read_events(io.BytesIO(recorded(0))))
    at = next(number for number, event in enumerate(events) if isinstance(event, Scheduled) and event.plan)
    plan = events[at].plan  # type: ignore[union-attr]
    assert plan is not None
    row = plan.rows[0]
    other = type(plan)(step=plan.step, introduce=plan.introduce, rows=[Row(row.slot, row.start, row.count + 1, True)])
    events[at] = Scheduled(other)
    _, logged, derived = next(replay(iter(events)))
    assert logged != derived


class FullAfter(io.BytesIO):
    """A file on a disk with room for so many bytes: the write that does not fit is short, and later ones fail."""

    def __init__(self, room: int) -> None:
        super().__init__()
        self.room = room

    def write(self, data: "ReadableBuffer", /) -> int:
        if not self.room:
            raise OSError(28, "No space left on device")
        written = super().write(memoryview(data)[: self.room])
        self.room -= written
        return written


@pytest.mark.parametrize("room", [0, 5, 700])
def test_a_full_disk_ends_the_log_and_nothing_else(room: int, caplog: pytest.LogCaptureFixture) -> None:
    plans = []
    for log in (io.BytesIO(), FullAfter(room)):
        core = RecordingScheduler(Scheduler(CoreConfig(), small_capacity()), LogFile(log).record)
        core.handle(Arrival("frontend-0", request("r", [1, 2, 3])))
        plans.append([core.schedule(), core.schedule()])
    assert plans[0][0] is not None
    assert plans[0] == plans[1]
    assert caplog.text.count("event log: write failed, recording stops: error=No space left on device") == 1
