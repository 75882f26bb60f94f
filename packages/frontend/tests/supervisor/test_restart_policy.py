import signal

import pytest

from tercet.frontend.supervisor.restart_policy import (
    EXIT_CONFIG,
    Action,
    GiveUp,
    Kill,
    PartTable,
    RestartScheduled,
    Start,
    StartupSlow,
    Timeouts,
    describe_exit,
)
from tercet.protocol.messages.messages import Heartbeat
from tercet.protocol.messages.values import Phase

TIMEOUTS = Timeouts()


def started_table(*names: str) -> PartTable:
    """Return a table of parts started at 0."""
    parts = PartTable(names or ("a",), TIMEOUTS, 0.0)
    assert parts.tick(0.0) == [Start(name) for name in names or ("a",)]
    return parts


def quiet(parts: PartTable, start: float, end: float) -> list[Action]:
    """Return all actions from start to end, with ticks as in the supervisor."""
    actions: list[Action] = []
    now = start
    while now <= end:
        actions += [action for action in parts.tick(now) if not isinstance(action, StartupSlow)]
        now += 0.25
    return actions


def step(age: float, longest: float = 0.0, phase: Phase = Phase.STEP) -> Heartbeat:
    return Heartbeat(phase=phase, step_age=age, longest_step=longest)


def test_all_parts_are_started_once_and_are_ready_together() -> None:
    parts = started_table("a", "b")
    assert quiet(parts, 0.25, 5.0) == []
    parts.on_ready("a", 5.0)
    assert not parts.all_ready
    parts.on_ready("b", 5.5)
    assert parts.all_ready


def test_restarts_are_immediate_then_back_off_up_to_the_cap() -> None:
    parts = started_table()
    now, waits = 0.0, []
    for _ in range(9):
        parts.on_ready("a", now)
        (later,) = parts.on_exit("a", -9, "", now)
        assert isinstance(later, RestartScheduled)
        waits.append(later.wait)
        assert quiet(parts, now, now + later.wait - 0.25) == []  # no time passes if it is immediate
        now += later.wait
        assert parts.tick(now) == [Start("a")]
    assert waits == [0, 1, 2, 4, 8, 16, 30, 30, 30]


def test_deaths_are_forgiven_after_a_while_of_health() -> None:
    parts = started_table()
    parts.on_ready("a", 0.0)
    parts.on_exit("a", 1, "", 1.0)
    parts.tick(2.0)
    parts.on_ready("a", 3.0)
    for now in range(3, 15):
        parts.on_heartbeat("a", float(now))
        assert parts.tick(float(now)) == []
    assert parts.on_exit("a", 1, "boom", 15.0) == [RestartScheduled("a", "boom (exit code 1)", 0.0)]


def test_a_part_that_was_never_ready_is_given_up_after_three_deaths() -> None:
    parts = started_table("a", "b")
    parts.on_ready("b", 0.0)
    assert parts.on_exit("a", 1, "no", 1.0) == [RestartScheduled("a", "no (exit code 1)", 1.0)]
    assert parts.tick(2.0) == [Start("a")]
    assert parts.on_exit("a", 1, "no", 3.0) == [RestartScheduled("a", "no (exit code 1)", 2.0)]
    assert parts.tick(5.0) == [Start("a")]
    (end,) = parts.on_exit("a", -11, "", 6.0)
    assert end == GiveUp("a died 3 times before it was ready: killed by SIGSEGV", 1)


def test_a_part_that_exits_on_request_is_replaced_at_once() -> None:
    parts = started_table()
    now = 0.0
    for _ in range(5):
        parts.on_ready("a", now)
        now += TIMEOUTS.clean_exit_after
        assert parts.on_exit("a", 0, "bye", now) == [RestartScheduled("a", "exit code 0", 0.0, left=True)]
        assert parts.tick(now) == [Start("a")]


def test_repeated_unrequested_exits_back_off() -> None:
    parts = started_table()
    now, waits = 0.0, []
    for _ in range(4):
        parts.on_ready("a", now)
        now += 1.0
        (later,) = parts.on_exit("a", 0, "", now)
        assert isinstance(later, RestartScheduled)
        assert not later.left
        waits.append(later.wait)
        now += later.wait
        assert parts.tick(now) == [Start("a")]
    assert waits == [0, 1, 2, 4]


def test_a_part_that_served_is_never_given_up_however_often_it_dies() -> None:
    parts = started_table()
    parts.on_ready("a", 0.0)
    now = 0.0
    for _ in range(50):
        (later,) = parts.on_exit("a", 1, "torn", now)
        assert isinstance(later, RestartScheduled)
        now += later.wait
        assert parts.tick(now) == [Start("a")]


def test_a_configuration_error_ends_the_start_at_once() -> None:
    parts = started_table()
    assert parts.on_exit("a", EXIT_CONFIG, "--dtype: no such dtype", 0.5) == [GiveUp("a: --dtype: no such dtype", 2)]


def test_a_configuration_error_after_serving_counts_as_a_crash() -> None:
    parts = started_table()
    parts.on_ready("a", 1.0)
    assert parts.on_exit("a", EXIT_CONFIG, "gone", 2.0) == [RestartScheduled("a", "gone (exit code 2)", 0.0)]


def test_silence_kills_once_and_the_part_starts_again() -> None:
    parts = started_table("a", "b")
    for name in ("a", "b"):
        parts.on_ready(name, 0.0)
    actions: list[Action] = []
    for now in range(1, 14):
        parts.on_heartbeat("b", float(now))
        actions += parts.tick(float(now))
    assert actions == [Kill("a", "no heartbeat for 11 s")]
    assert parts.on_exit("a", -9, "", 14.0) == [RestartScheduled("a", "no heartbeat for 11 s", 0.0)]
    parts.on_heartbeat("b", 15.0)
    assert parts.tick(15.0) == [Start("a")]


def test_the_deadline_is_the_next_start_or_the_next_silence_timeout() -> None:
    parts = PartTable(("a", "b"), TIMEOUTS, 5.0)
    assert parts.deadline == 5.0
    parts.tick(5.0)
    assert parts.deadline == float("inf"), "what loads libraries may be silent"
    parts.on_heartbeat("a", 6.0)
    assert parts.deadline == 6.0 + TIMEOUTS.loading_silence
    for name, now in (("a", 7.0), ("b", 8.0)):
        parts.on_ready(name, now)
    assert parts.deadline == 7.0 + TIMEOUTS.silence
    parts.on_heartbeat("a", 9.0)
    assert parts.deadline == 8.0 + TIMEOUTS.silence
    assert quiet(parts, 5.25, parts.deadline) == []
    assert parts.tick(parts.deadline + 0.01) == [Kill("b", "no heartbeat for 10 s")]
    assert parts.deadline == 9.0 + TIMEOUTS.silence, "it is not killed twice"
    parts.on_exit("b", -9, "", 18.5)
    parts.on_exit("a", -9, "", 18.6)
    assert parts.deadline == 18.5


def test_a_part_that_is_still_starting_may_be_silent() -> None:
    parts = started_table()
    assert quiet(parts, 0.0, 120.0) == []


def test_a_part_that_is_loading_may_be_silent_for_longer() -> None:
    parts = started_table()
    parts.on_heartbeat("a", 0.0, Heartbeat(phase=Phase.LOADING))
    assert quiet(parts, 0.0, 60.0) == []
    assert quiet(parts, 60.25, 61.0) == [Kill("a", "no heartbeat for 60 s")]


def test_silence_that_this_process_slept_through_is_nobodys_fault() -> None:
    parts = started_table()
    parts.on_ready("a", 0.0)
    assert quiet(parts, 0.0, 1.0) == []
    assert parts.tick(100.0) == []
    assert quiet(parts, 100.25, 110.0) == []
    assert quiet(parts, 110.25, 111.0) == [Kill("a", "no heartbeat for 10 s")]


def test_time_that_this_process_slept_through_is_none_that_a_start_takes() -> None:
    parts = started_table()
    later = TIMEOUTS.startup + 50.0
    assert quiet(parts, 0.0, 50.0) == []
    assert parts.tick(later) == []
    assert quiet(parts, later, later + TIMEOUTS.startup - 51.0) == []
    given_up, *_ = quiet(parts, later + TIMEOUTS.startup - 51.0, later + TIMEOUTS.startup - 49.0)
    assert isinstance(given_up, GiveUp)


@pytest.mark.parametrize(
    ("heartbeat", "stuck"),
    [
        (step(29.0), False),
        (step(31.0), True),
        (step(31.0, longest=2.0), False),
        (step(41.0, longest=2.0), True),
        (step(31.0, phase=Phase.DRAINING), True),
        (step(500.0, phase=Phase.COMPILING), False),
        (step(500.0, phase=Phase.LOADING), False),
    ],
)
def test_a_step_is_stuck_only_when_far_older_than_any_before(heartbeat: Heartbeat, stuck: bool) -> None:
    parts = started_table()
    parts.on_ready("a", 0.0)
    actions = parts.on_heartbeat("a", 1.0, heartbeat)
    assert actions == ([Kill("a", f"stuck in one step for {heartbeat.step_age:.0f} s")] if stuck else [])
    assert parts.on_heartbeat("a", 1.5, heartbeat) == []


def test_a_start_that_takes_too_long_is_given_up() -> None:
    parts = started_table("a", "b")
    parts.on_ready("b", 1.0)
    now = 0.0
    actions: list[Action] = []
    while not actions:
        now += 1.0
        parts.on_heartbeat("b", now)
        actions = [action for action in parts.tick(now) if not isinstance(action, StartupSlow)]
    assert actions == [GiveUp("a was not ready within 600 s (--startup-timeout): it has said nothing", 1)]


def test_a_slow_start_is_reported_once_with_the_last_output() -> None:
    parts = started_table("a", "b", "c", "d")
    parts.optional.add("d")
    parts.on_ready("c", 1.0)
    told: list[Action] = []
    for now in range(1, 130):
        parts.on_heartbeat("b", now)
        parts.on_heartbeat("b", now, Heartbeat(phase=Phase.LOADING))
        parts.on_heartbeat("c", now)
        told += parts.tick(now + 0.5)
    assert told == [
        StartupSlow("a", "not ready 60 s after its start: it has said nothing"),
        StartupSlow("b", "not ready 60 s after its start: it said loading 0 s ago"),
    ]


def test_a_restarted_part_that_never_gets_ready_is_killed_not_given_up() -> None:
    parts = started_table()
    parts.on_ready("a", 0.0)
    parts.on_exit("a", 1, "", 1.0)
    assert quiet(parts, 1.0, 3.0) == [Start("a")]
    assert quiet(parts, 3.0, 605.0) == [Kill("a", "not ready 600 s after its restart")]


def test_late_words_of_a_dead_part_change_nothing() -> None:
    parts = started_table()
    parts.on_ready("a", 0.0)
    parts.on_exit("a", 1, "", 1.0)
    parts.on_ready("a", 1.0)
    parts.on_heartbeat("a", 1.0)
    parts.on_ready("stranger", 1.0)
    assert not parts.all_ready
    assert parts.tick(2.0) == [Start("a")]


@pytest.mark.parametrize(
    ("code", "last_error", "text"),
    [
        (1, "", "exit code 1"),
        (3, "ValueError: bad", "ValueError: bad (exit code 3)"),
        (-signal.SIGSEGV, "", "killed by SIGSEGV"),
        (-signal.SIGKILL, "INFO: all is well", "killed by SIGKILL (did memory run out?)"),
        (-signal.SIGABRT, "assertion failed", "assertion failed (killed by SIGABRT)"),
        (-250, "", "killed by signal 250"),
    ],
)
def test_exits_are_described_in_words(code: int, last_error: str, text: str) -> None:
    assert describe_exit(code, last_error) == text


def test_a_part_that_is_not_needed_is_neither_waited_for_nor_given_up() -> None:
    parts = started_table("a", "b")
    parts.optional.add("b")
    assert not parts.all_ready
    parts.on_ready("a", 1.0)
    assert parts.all_ready
    parts.on_heartbeat("a", 1e9)
    assert [parts.on_exit("b", code, "", 2.0 + code)[0].__class__ for code in (1, EXIT_CONFIG, 3, 4)] == [
        RestartScheduled
    ] * 4
    waiting = started_table("c")
    waiting.optional.add("c")
    assert quiet(waiting, 0.25, TIMEOUTS.startup + 5) == []
