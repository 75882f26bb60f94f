from tercet.protocol.membership.heartbeat_timer import is_stuck
from tercet.protocol.messages.values import Held, Load, Phase
from tercet.protocol.system.clock import SuspendAwareClock
from tercet.protocol.testing import ScriptedClock
from tercet.scheduler.status import StatusBoard


def test_a_step_ages_until_it_ends() -> None:
    clock = ScriptedClock()
    board = StatusBoard(clock)
    assert board.heartbeat("f").phase == Phase.LOADING
    board.begin_step()
    clock.advance(3.0)
    assert (board.heartbeat("f").phase, board.heartbeat("f").step_age) == (Phase.STEP, 3.0)
    board.end_step()
    beat = board.heartbeat("f")
    assert (beat.steps, beat.step_age, beat.longest_step) == (1, 0.0, 3.0)


def test_steps_that_overlap_take_no_longer_than_the_time_there_is() -> None:
    clock = ScriptedClock()
    board = StatusBoard(clock)
    board.begin_step()
    clock.advance(1.0)
    board.begin_step()
    clock.advance(1.0)
    board.advance()
    board.end_step(more=True)
    clock.advance(3.0)
    assert board.heartbeat("f").step_seconds == 2.0
    board.end_step()
    clock.advance(60.0)
    board.enter(Phase.IDLE)
    assert (board.heartbeat("f").steps, board.heartbeat("f").step_seconds) == (2, 5.0)


def test_a_step_that_tells_of_its_pieces_is_as_old_as_the_last_of_them() -> None:
    clock = ScriptedClock()
    board = StatusBoard(clock)
    board.advance()
    clock.advance(500.0)
    board.begin_step()
    for _ in range(10):
        clock.advance(10.0)
        assert board.heartbeat("f").step_age == 10.0
        board.advance()
    clock.advance(4.0)
    board.end_step(more=True)
    beat = board.heartbeat("f")
    assert (beat.steps, beat.step_age, beat.longest_step) == (1, 0.0, 10.0), "what a step takes in all says nothing"
    clock.advance(199.0)
    assert not is_stuck(board.heartbeat("f"))
    clock.advance(2.0)
    assert is_stuck(board.heartbeat("f"))


def test_a_step_without_progress_is_stuck_after_the_longest_piece() -> None:
    clock = ScriptedClock()
    board = StatusBoard(clock)
    board.begin_step()
    clock.advance(1.0)
    board.advance()
    clock.advance(31.0)
    assert is_stuck(board.heartbeat("f"))


def test_a_step_is_no_older_for_what_the_machine_slept() -> None:
    clock = ScriptedClock()
    board = StatusBoard(SuspendAwareClock(clock))
    board.begin_step()
    clock.advance(1.0)
    board.heartbeat("f")
    clock.advance(600.0)
    beat = board.heartbeat("f")
    assert beat.step_age == 1.0
    assert not is_stuck(beat)


def test_the_last_of_several_steps_in_flight_ages_too() -> None:
    """With overlap the loop may end by waiting for a step that nothing was submitted after: if it hangs, it shows."""
    clock = ScriptedClock()
    board = StatusBoard(clock)
    board.begin_step()
    clock.advance(1.0)
    board.begin_step()
    clock.advance(1.0)
    assert board.heartbeat("f").step_age == 2.0
    board.end_step(more=True)
    clock.advance(40.0)
    assert board.heartbeat("f").step_age == 40.0
    board.end_step()
    board.enter(Phase.IDLE)
    beat = board.heartbeat("f")
    assert (beat.phase, beat.steps, beat.step_age, beat.longest_step) == (Phase.IDLE, 2, 0.0, 40.0)


def test_draining_outlasts_every_phase_and_is_news_once() -> None:
    board = StatusBoard(ScriptedClock())
    assert board.drain()
    assert not board.drain()
    board.begin_step()
    assert board.heartbeat("f").phase == Phase.DRAINING


def test_each_frontend_hears_of_its_own_requests() -> None:
    board = StatusBoard(ScriptedClock())
    board.publish(Load(running=2), {"f": Held(rids=["a"])})
    assert board.heartbeat("f").held.rids == ["a"]
    assert board.heartbeat("g").held.rids == []
    assert board.heartbeat("g").load.running == 2
