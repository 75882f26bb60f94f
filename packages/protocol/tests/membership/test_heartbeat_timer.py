"""Due times of heartbeats, by a scripted clock."""

import pytest

from tercet.protocol.membership.heartbeat_timer import IDLE_AFTER, HeartbeatTimer, is_busy, is_stuck
from tercet.protocol.messages.messages import Heartbeat
from tercet.protocol.messages.values import Held, Load, Phase


def at_rest(interval: float = 0.25, silence: float = 2.0) -> HeartbeatTimer:
    """Return a timer that last sent at 90, long after the last activity."""
    timer = HeartbeatTimer(interval, silence)
    timer.note_activity(90.0 - 2 * IDLE_AFTER)
    timer.sent(90.0)
    return timer


def test_the_first_beat_is_due_at_once() -> None:
    assert HeartbeatTimer(0.25, 2.0).due < 0


def test_heartbeats_are_quick_under_load_and_slow_when_idle() -> None:
    timer = HeartbeatTimer(0.25, 2.0)
    timer.note_activity(0.0)
    now, gaps = 0.0, []
    for _ in range(14):
        timer.sent(now)
        gaps.append(timer.due - now)
        now = timer.due
    assert gaps == [0.25] * 9 + [0.75] * 5


def test_work_brings_the_next_beat_forward_and_says_so_once() -> None:
    timer = at_rest()
    assert timer.due == 90.75
    assert timer.note_activity(90.5)
    assert timer.due == 90.25, "overdue, so it goes out now"
    assert not timer.note_activity(90.6)


def test_idle_heartbeats_are_aligned_and_at_most_an_eighth_late() -> None:
    dues = set()
    for late in range(75):
        timer = at_rest()
        timer.sent(90.0 + late / 100)
        assert 0.75 / 8 <= timer.due - (90.0 + late / 100) <= 0.75 * 9 / 8
        dues.add(timer.due)
    assert dues == {90.75, 91.5}


@pytest.mark.parametrize(
    ("interval", "silence", "rest"), [(0.25, 2.0, 0.75), (0.25, 60.0, 0.75), (0.5, 2.0, 0.75), (1.5, 2.0, 1.5)]
)
def test_a_beat_at_rest_comes_well_within_what_others_take_for_death(
    interval: float, silence: float, rest: float
) -> None:
    assert at_rest(interval, silence).due - 90.0 == rest


@pytest.mark.parametrize(
    ("heartbeat", "busy"),
    [
        (Heartbeat(phase=Phase.IDLE), False),
        (Heartbeat(phase=Phase.IDLE, steps=9, longest_step=1.0, load=Load(pages_cached=5, output_tokens=7)), False),
        (Heartbeat(phase=Phase.STEP), True),
        (Heartbeat(phase=Phase.LOADING), True),
        (Heartbeat(phase=Phase.COMPILING), True),
        (Heartbeat(phase=Phase.DRAINING), True),
        (Heartbeat(phase=Phase.IDLE, load=Load(running=1)), True),
        (Heartbeat(phase=Phase.IDLE, load=Load(queued=1)), True),
        (Heartbeat(phase=Phase.IDLE, held=Held(rids=["r"])), True),
    ],
)
def test_who_has_work_is_busy_and_who_had_some_is_not(heartbeat: Heartbeat, busy: bool) -> None:
    assert is_busy(heartbeat) is busy


@pytest.mark.parametrize(
    ("phase", "age", "longest", "stuck"),
    [
        (Phase.STEP, 29.0, 0.0, False),
        (Phase.STEP, 31.0, 0.0, True),
        (Phase.DRAINING, 31.0, 1.0, True),
        (Phase.STEP, 39.0, 2.0, False),
        (Phase.STEP, 41.0, 2.0, True),
        (Phase.LOADING, 500.0, 0.0, False),
        (Phase.COMPILING, 500.0, 0.0, False),
    ],
)
def test_a_step_is_stuck_only_when_far_older_than_any_before(
    phase: Phase, age: float, longest: float, stuck: bool
) -> None:
    assert is_stuck(Heartbeat(phase=phase, step_age=age, longest_step=longest)) is stuck
