from tercet.protocol.system.clock import PAUSE, SuspendAwareClock
from tercet.protocol.testing import ScriptedClock


def test_time_that_is_read_often_goes_by_as_it_does() -> None:
    clock = ScriptedClock()
    awake = SuspendAwareClock(clock)
    began = awake()
    for _ in range(100):
        clock.advance(PAUSE)
        awake()
    assert awake() == began + 100 * PAUSE


def test_what_a_process_sleeps_does_not_count() -> None:
    clock = ScriptedClock()
    awake = SuspendAwareClock(clock)
    began = awake()
    clock.advance(1.0)
    awake()
    clock.advance(600.0)
    assert awake() == began + 1.0
    clock.advance(0.5)
    assert awake() == began + 1.5
    clock.advance(3600.0)
    clock.advance(0.0)
    assert awake() == began + 1.5
