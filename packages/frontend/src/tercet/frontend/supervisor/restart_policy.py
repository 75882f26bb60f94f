"""Restart policy: decisions for parts that die, hang or never become ready, with the time passed in."""

import signal
from collections.abc import Iterable
from dataclasses import dataclass

from tercet.protocol.membership.heartbeat_timer import is_stuck
from tercet.protocol.messages.messages import Heartbeat
from tercet.protocol.messages.values import Phase

EXIT_CONFIG = 2
"""Exit code of a part with an invalid configuration, which it has reported. A restart would not help."""


@dataclass(frozen=True)
class Timeouts:
    """Timeouts of parts, in seconds, and limits on their deaths."""

    backoff: float = 1.0
    """Delay of the second restart, doubled for each further one. The first is immediate if the part was ever ready."""
    backoff_cap: float = 30.0
    deaths_reset_after: float = 10.0
    """Time being ready after which a part's earlier deaths no longer count."""
    clean_exit_after: float = 5.0
    """Time being ready after which an exit with code 0 counts as requested, not as a death."""
    max_start_deaths: int = 3
    """Deaths of a part that was never ready after which the whole start fails."""
    silence: float = 10.0
    """Time without a heartbeat after which a part counts as hung."""
    loading_silence: float = 60.0
    """The same limit before a part is ready, when imports and compilation can block every thread of its process."""
    startup: float = 600.0
    """Limit for all parts to be ready, and for a restarted part."""
    suspend_threshold: float = 2.0
    """Time between ticks above which this process was suspended, so silence of the parts in it does not count."""


@dataclass(frozen=True)
class Start:
    """Action: start a part's process."""

    name: str


@dataclass(frozen=True)
class Kill:
    """Action: kill a part's process. Its exit is reported later."""

    name: str
    reason: str


@dataclass(frozen=True)
class RestartScheduled:
    """Report: a part died of `reason`, and a Start follows in `wait` seconds.

    With `left` it did not die but exited as requested, and is started again.
    """

    name: str
    reason: str
    wait: float
    left: bool = False


@dataclass(frozen=True)
class StartupSlow:
    """Report: a part is not ready after `loading_silence`; `state` describes it."""

    name: str
    state: str


@dataclass(frozen=True)
class GiveUp:
    """Action: end the server with this exit code and reason."""

    reason: str
    code: int


Action = Start | Kill | RestartScheduled | StartupSlow | GiveUp


def describe_exit(code: int, last_error: str = "") -> str:
    """Describe how a process ended: its last error line, if it can have known the reason, and the code."""
    if code < 0:
        name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
        how = f"killed by {name}" + (" (did memory run out?)" if -code == signal.SIGKILL else "")
    else:
        how = f"exit code {code}"
    knew = last_error and code not in {0, -signal.SIGKILL}
    return f"{last_error} ({how})" if knew else how


@dataclass
class _PartState:
    """State of one part. `restart_at` is set exactly while the part has no process."""

    started_at: float
    restart_at: float | None = None
    heard_at: float | None = None
    """Time of the last heartbeat; None before this process's first."""
    phase: Phase | None = None
    """Phase in that heartbeat."""
    ready_at: float | None = None
    slow_reported: bool = False
    ever_ready: bool = False
    deaths: int = 0
    kill_reason: str = ""

    def describe(self, now: float) -> str:
        """Describe the last heartbeat in words."""
        if self.heard_at is None:
            return "it has said nothing"
        saying = f"said {self.phase.value}" if self.phase else "said hello"
        return f"it {saying} {max(0.0, now - self.heard_at):.0f} s ago"


class PartTable:
    """States of all parts. `on_heartbeat`, `on_ready`, `on_exit` and `tick` update them and return actions."""

    def __init__(self, names: Iterable[str], timeouts: Timeouts, now: float) -> None:
        self._timeouts = timeouts
        self._started_at = self._ticked_at = now
        self._states = {name: _PartState(now, restart_at=now) for name in names}
        self.optional: set[str] = set()
        """Parts that the server does not need: they are restarted, but never waited for and no reason to give up."""

    @property
    def all_ready(self) -> bool:
        """Return whether every required part is ready."""
        return all(name in self.optional or part.ready_at is not None for name, part in self._states.items())

    def on_heartbeat(self, name: str, now: float, heartbeat: Heartbeat | None = None) -> list[Action]:
        """Note a message of a part, and kill the part if one step is stuck while heartbeats continue."""
        part = self._running_part(name)
        if part is None:
            return []
        part.heard_at = now
        if heartbeat is None:
            return []
        part.phase = heartbeat.phase
        if not is_stuck(heartbeat):
            return []
        return self._kill(name, part, f"stuck in one step for {heartbeat.step_age:.0f} s")

    def on_ready(self, name: str, now: float) -> None:
        if part := self._running_part(name):
            part.heard_at = part.ready_at = now
            part.ever_ready = True

    def on_exit(self, name: str, code: int, last_error: str, now: float) -> list[Action]:
        """Schedule the restart of a part whose process ended, or give up if it was never ready."""
        part = self._states[name]
        left = code == 0 and part.ready_at is not None and now - part.ready_at >= self._timeouts.clean_exit_after
        part.deaths += not left
        how = part.kill_reason or describe_exit(code, last_error)
        if not part.ever_ready and code == EXIT_CONFIG and name not in self.optional:
            return [GiveUp(f"{name}: {last_error or describe_exit(code)}", EXIT_CONFIG)]
        if not part.ever_ready and part.deaths >= self._timeouts.max_start_deaths and name not in self.optional:
            return [GiveUp(f"{name} died {part.deaths} times before it was ready: {how}", 1)]
        wait = 0.0 if left else self._backoff(part)
        part.restart_at = now + wait
        part.heard_at = part.phase = part.ready_at = None
        part.kill_reason, part.slow_reported = "", False
        return [RestartScheduled(name, how, wait, left)]

    def _backoff(self, part: _PartState) -> float:
        """Return seconds until the restart: none after the first death of a part that was ready, then doubling."""
        doublings = part.deaths - 1 - part.ever_ready
        return (
            0.0
            if doublings < 0
            else min(self._timeouts.backoff_cap, self._timeouts.backoff * 2.0 ** min(doublings, 30))
        )

    def tick(self, now: float) -> list[Action]:
        """Return the actions that are due. Call it at `deadline`, and at least every second."""
        if (slept := now - self._ticked_at) > self._timeouts.suspend_threshold:
            self._started_at += slept
            for part in self._states.values():
                part.started_at += slept
                part.heard_at = None if part.heard_at is None else now
        self._ticked_at = now
        actions: list[Action] = []
        for name, part in self._states.items():
            actions += self._actions_due(name, part, now)
        return actions

    @property
    def deadline(self) -> float:
        """Time of the next restart or heartbeat timeout."""
        return min(map(self._deadline_of, self._states.values()), default=float("inf"))

    def _deadline_of(self, part: _PartState) -> float:
        if part.restart_at is not None:
            return part.restart_at
        if part.heard_at is None or part.kill_reason:
            return float("inf")
        return part.heard_at + self._silence_limit(part)

    def _silence_limit(self, part: _PartState) -> float:
        return self._timeouts.loading_silence if part.ready_at is None else self._timeouts.silence

    def _actions_due(self, name: str, part: _PartState, now: float) -> list[Action]:
        timeouts = self._timeouts
        if part.restart_at is not None:
            if now < part.restart_at:
                return []
            part.restart_at, part.started_at = None, now
            return [Start(name)]
        if part.ready_at is not None and now - part.ready_at > timeouts.deaths_reset_after:
            part.deaths = 0
        if part.heard_at is not None and now - part.heard_at > self._silence_limit(part):
            return self._kill(name, part, f"no heartbeat for {now - part.heard_at:.0f} s")
        if (
            part.ready_at is None
            and now - (part.started_at if part.ever_ready else self._started_at) > timeouts.startup
        ):
            if part.ever_ready:
                return self._kill(name, part, f"not ready {timeouts.startup:g} s after its restart")
            if name in self.optional:
                return []
            state = part.describe(now)
            return [GiveUp(f"{name} was not ready within {timeouts.startup:g} s (--startup-timeout): {state}", 1)]
        slow = part.ready_at is None and not part.slow_reported and name not in self.optional
        if slow and now - part.started_at > timeouts.loading_silence:
            part.slow_reported = True
            return [StartupSlow(name, f"not ready {now - part.started_at:.0f} s after its start: {part.describe(now)}")]
        return []

    def _kill(self, name: str, part: _PartState, reason: str) -> list[Action]:
        if part.kill_reason:
            return []
        part.kill_reason = reason
        return [Kill(name, reason)]

    def _running_part(self, name: str) -> _PartState | None:
        part = self._states.get(name)
        return None if part is None or part.restart_at is not None else part
