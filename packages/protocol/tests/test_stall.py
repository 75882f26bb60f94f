"""Duration of a loop's stall, as its heartbeats report it."""

import threading

from tercet.protocol.aio import Stall, StallWatch
from tercet.protocol.membership.heartbeat_timer import is_stuck
from tercet.protocol.messages.messages import Heartbeat
from tercet.protocol.messages.values import Phase


def looked(stall: Stall, due: float, *times: float) -> float:
    for now in times:
        stall.observe(now, due)
    return stall.age


def test_it_grows_until_the_loop_goes_on() -> None:
    stall = Stall(max_gap=1.0)
    assert looked(stall, 1.0, 0.5, 1.0) == 0
    assert looked(stall, 1.0, 1.5, 2.0, 2.5) == 1.5
    assert looked(stall, 3.0, 3.0) == 0
    assert stall.longest == 1.5


def test_a_loop_that_never_goes_on_is_stuck() -> None:
    stall = Stall(max_gap=1.0)
    age = looked(stall, 0.0, *(each / 2 for each in range(62)))
    assert is_stuck(Heartbeat(phase=Phase.STEP, step_age=age, longest_step=stall.longest))


def test_time_that_the_process_was_stopped_does_not_count() -> None:
    stall = Stall(max_gap=1.0)
    assert looked(stall, 1.0, 0.9, 3600.0) == 1.0


def test_a_loop_in_time_is_left_to_beat_itself() -> None:
    beats, clock, waited = [], iter(range(1, 1000)), threading.Event()
    now = 0.0

    def read() -> float:
        nonlocal now
        now = float(next(clock, 1000))
        if now > 20:
            waited.set()
        return now

    watch = StallWatch(lambda: now, lambda age, longest: beats.append((age, longest)), 0.01, read)
    watch.start()
    assert waited.wait(5)
    watch.stop()
    assert beats == []
