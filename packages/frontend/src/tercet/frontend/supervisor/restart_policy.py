"""Which parts to start and what to do when one dies, hangs or never gets ready: decisions only, with time passed in."""

import signal
from collections.abc import Iterable
from dataclasses import dataclass

from tercet.protocol.membership.heartbeat_timer import is_stuck
from tercet.protocol.messages.messages import Heartbeat
from tercet.protocol.messages.values import Phase

EXIT_CONFIG = 2
"""A part that exits with this was told something it cannot do, and has said what: starting it again would not help."""


@dataclass(frozen=True)
class Timeouts:
    """How long parts are waited for, in seconds, and how often they may fail."""

    backoff: float = 1.0
    """Before the second restart; doubled for each further one. The first is immediate, unless it never was ready."""
    backoff_cap: float = 30.0
    deaths_reset_after: float = 10.0
    """Ready for this long, a part's earlier deaths no longer count."""
    clean_exit_after: float = 5.0
    """A part that exits with 0 after being ready for this long left because it was asked to: that is no death."""
    max_start_deaths: int = 3
    """Deaths of a part that was never ready, before the whole start is given up."""
    silence: float = 10.0
    """Without a heartbeat, before a part counts as hung."""
    loading_silence: float = 60.0
    """The same for one not ready yet: loading libraries and compiling can hold up every thread of a process."""
    startup: float = 600.0
    """For all parts to be ready, and for one that was restarted."""
    suspend_threshold: float = 2.0
    """Longer without a tick, and it was this process that slept: nobody else's silence counts."""


@dataclass(frozen=True)
class Start:
    """Start this part's process."""

    name: str


@dataclass(frozen=True)
class Kill:
    """Kill this part's process, which will be seen to exit."""

    name: str
    reason: str


@dataclass(frozen=True)
class RestartScheduled:
    """Nothing to do but to say: this part died of `reason` and a Start will follow in `wait` seconds.

    `left`: it did not die but went as it was told to, and its place is filled again.
    """

    name: str
    reason: str
    wait: float
    left: bool = False


@dataclass(frozen=True)
class StartupSlow:
    """Nothing to do but to say: this part is not ready after `loading_silence`; `state` is what is known of it."""

    name: str
    state: str


@dataclass(frozen=True)
class GiveUp:
    """End the server, with this exit code and reason."""

    reason: str
    code: int


Action = Start | Kill | RestartScheduled | StartupSlow | GiveUp


def describe_exit(code: int, last_error: str = "") -> str:
    """How a process ended, in words: its own last line where it can have known."""
    if code < 0:
        name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
        how = f"killed by {name}" + (" (did memory run out?)" if -code == signal.SIGKILL else "")
    else:
        how = f"exit code {code}"
    knew = last_error and code not in {0, -signal.SIGKILL}
    return f"{last_error} ({how})" if knew else how


@dataclass
class _PartState:
    """What is known of one part. `restart_at` is set exactly while it has no process."""

    started_at: float
    restart_at: float | None = None
    heard_at: float | None = None
    """Last heartbeat; None before this process's first."""
    phase: Phase | None = None
    """What that heartbeat said it does."""
    ready_at: float | None = None
    slow_reported: bool = False
    ever_ready: bool = False
    deaths: int = 0
    kill_reason: str = ""

    def describe(self, now: float) -> str:
        """In words, what its process last said."""
        if self.heard_at is None:
            return "it has said nothing"
        saying = f"said {self.phase.value}" if self.phase else "said hello"
        return f"it {saying} {max(0.0, now - self.heard_at):.0f} s ago"


class PartTable:
    """The parts and their fates. Mutated by what happened (`heard`, `ready`, `exited`) and by `tick`, which decide."""

    def __init__(self, names: Iterable[str], timeouts: Timeouts, now: float) -> None:
        self._timeouts = timeouts
        self._started_at = self._ticked_at = now
        self._states = {name: _PartState(now, restart_at=now) for name in names}
        self.optional: set[str] = set()
        """Parts that the server can do without: kept alive as others are, but never waited for or given up."""

    @property
    def all_ready(self) -> bool:
        """Every part that is needed is ready now."""
        return all(name in self.optional or part.ready_at is not None for name, part in self._states.items())

    def on_heartbeat(self, name: str, now: float, heartbeat: Heartbeat | None = None) -> list[Action]:
        """A part spoke. A step far older than any before it is stuck, though heartbeats go on."""
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
        """A part can take work."""
        if part := self._running_part(name):
            part.heard_at = part.ready_at = now
            part.ever_ready = True

    def on_exit(self, name: str, code: int, last_error: str, now: float) -> list[Action]:
        """A part's process is gone: schedule its next one, or give up. Only what was never ready is given up."""
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
        """Seconds until the next start: none after the first death of a part that has served, then more each time."""
        doublings = part.deaths - 1 - part.ever_ready
        return (
            0.0
            if doublings < 0
            else min(self._timeouts.backoff_cap, self._timeouts.backoff * 2.0 ** min(doublings, 30))
        )

    def tick(self, now: float) -> list[Action]:
        """What is due by now. Call it at `deadline`, and at least every second."""
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
        """When somebody is to be started, or will have been silent for too long, if nothing happens before."""
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
