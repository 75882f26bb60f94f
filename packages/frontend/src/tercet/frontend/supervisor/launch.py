"""Which parts to start and what to do when one dies, hangs or never gets ready: decisions only, with time passed in."""

import signal
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tercet.frontend.supervisor.options import ServeConfig, extra_flags
from tercet.protocol.membership.heartbeat_timer import is_stuck
from tercet.protocol.messages.messages import Heartbeat
from tercet.protocol.messages.values import Phase, Role
from tercet.protocol.transport.endpoints import supervised_id

EXIT_CONFIG = 2
"""A part that exits with this was told something it cannot do, and has said what: starting it again would not help."""

_MAX_LORAS = 8


@dataclass(frozen=True)
class PartSpec:
    """A process to keep alive. `command` lacks only what every part is given: peer id, addresses, parent pipe."""

    name: str
    """Its peer id."""
    role: Role
    command: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    """Added to the environment: what must not show in a command line."""
    gets_socket: bool = False
    """Inherits the listening socket, as --fd."""
    at_first: tuple[str, ...] = ()
    """Added to the command until it has been ready once: what is to end the start, and no server that serves."""


def local_parts(config: ServeConfig, directory: Path, *, frontends: bool = True) -> list[PartSpec]:
    """The parts of a one-machine server whose inboxes lie in `directory`; without frontends it serves offline use."""
    module = (sys.executable, "-m")
    parts = [
        PartSpec(
            supervised_id(Role.SCHEDULER, number),
            Role.SCHEDULER,
            (
                *(*module, "tercet.scheduler", f"--model={config.model}"),
                *config.scheduler.flags(),
                *_own_adapters(config),
                *_own_gpus(config, number),
                *extra_flags(config.scheduler_extra),
            ),
        )
        for number in range(config.serve.dp_size)
    ]
    parts += [
        PartSpec(
            supervised_id(Role.DETOKENIZER, number),
            Role.DETOKENIZER,
            (*module, "tercet.detokenizer", *extra_flags(config.detokenizer_extra)),
        )
        for number in range(config.serve.detokenizer_workers)
    ]
    if not frontends:
        return parts
    frontend = config.frontend
    flags = [
        *frontend_flags(config),
        *("--scheduler", f"ipc://{directory}/scheduler-*", "--detokenizer", f"ipc://{directory}/detokenizer-*"),
    ]
    given = {"TERCET_API_KEYS": frontend.api_key, "TERCET_ADMIN_KEYS": frontend.admin_key}
    env = {name: "\n".join(keys) for name, keys in given.items() if keys}
    command = (*module, "tercet.frontend", *flags)
    at_first = ("--require-lora",) if frontend.lora else ()
    names = [supervised_id(Role.FRONTEND, number) for number in range(config.serve.frontend_workers)]
    for name in names:
        siblings = (f"--sibling={other}" for other in names if other != name)
        parts.append(PartSpec(name, Role.FRONTEND, (*command, *siblings), env, gets_socket=True, at_first=at_first))
    return parts


def frontend_flags(config: ServeConfig) -> list[str]:
    """What frontends are told of how they serve."""
    frontend = config.frontend
    named = {
        "served-model-name": frontend.served_model_name,
        "tool-call-parser": frontend.tool_call_parser,
        "reasoning-parser": frontend.reasoning_parser,
        "reasoning-field-name": frontend.reasoning_field_name,
        "shutdown-grace": frontend.shutdown_grace,
    }
    return [
        *(f"--{name}={value}" for name, value in named.items() if value is not None),
        *(f"--lora={name}={path}" for name, path in config.lora.items()),
        *(f"--allowed-origin={origin}" for origin in frontend.allowed_origin),
        f"--response-store={frontend.response_store}",
        *extra_flags(config.frontend_extra),
    ]


def _own_gpus(config: ServeConfig, number: int) -> list[str]:
    """Where there are GPUs, the scheduler of that number takes those behind the others', unless it was told which."""
    if config.serve.dp_size == 1 or "device" in config.scheduler_extra:
        return []
    return [f"--device=auto:{number * (config.scheduler.tensor_parallel_size or 1)}"]


def _own_adapters(config: ServeConfig) -> list[str]:
    """Adapters that are named are to be run, unless it was told how many."""
    return [f"--max-loras={_MAX_LORAS}"] if config.frontend.lora and config.scheduler.max_loras is None else []


@dataclass(frozen=True)
class Timeouts:
    """How long parts are waited for, in seconds, and how often they may fail."""

    backoff: float = 1.0
    """Before the second restart; doubled for each further one. The first is immediate, unless it never was ready."""
    backoff_cap: float = 30.0
    forgiven_after: float = 10.0
    """Ready for this long, a part's earlier deaths no longer count."""
    settled: float = 5.0
    """A part that exits with 0 after being ready for this long left because it was asked to: that is no death."""
    attempts: int = 3
    """Deaths of a part that was never ready, before the whole start is given up."""
    silence: float = 10.0
    """Without a heartbeat, before a part counts as hung."""
    loading_silence: float = 60.0
    """The same for one not ready yet: loading libraries and compiling can hold up every thread of a process."""
    startup: float = 600.0
    """For all parts to be ready, and for one that was restarted."""
    own_pause: float = 2.0
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
class Later:
    """Nothing to do but to say: this part died of `reason` and a Start will follow in `wait` seconds.

    `left`: it did not die but went as it was told to, and its place is filled again.
    """

    name: str
    reason: str
    wait: float
    left: bool = False


@dataclass(frozen=True)
class Slow:
    """Nothing to do but to say: this part is not ready after `loading_silence`; `state` is what is known of it."""

    name: str
    state: str


@dataclass(frozen=True)
class GiveUp:
    """End the server, with this exit code and reason."""

    reason: str
    code: int


Action = Start | Kill | Later | Slow | GiveUp


def describe_exit(code: int, last_words: str = "") -> str:
    """How a process ended, in words: its own last line where it can have known."""
    if code < 0:
        name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
        how = f"killed by {name}" + (" (did memory run out?)" if -code == signal.SIGKILL else "")
    else:
        how = f"exit code {code}"
    knew = last_words and code not in {0, -signal.SIGKILL}
    return f"{last_words} ({how})" if knew else how


@dataclass
class _Watch:
    """What is known of one part. `restart_at` is set exactly while it has no process."""

    started: float
    restart_at: float | None = None
    heard: float | None = None
    """Last heartbeat; None before this process's first."""
    phase: Phase | None = None
    """What that heartbeat said it does."""
    ready: float | None = None
    told_slow: bool = False
    ever_ready: bool = False
    deaths: int = 0
    killed_for: str = ""

    def state(self, now: float) -> str:
        """In words, what its process last said."""
        if self.heard is None:
            return "it has said nothing"
        saying = f"said {self.phase.value}" if self.phase else "said hello"
        return f"it {saying} {max(0.0, now - self.heard):.0f} s ago"


class PartTable:
    """The parts and their fates. Mutated by what happened (`heard`, `ready`, `exited`) and by `tick`, which decide."""

    def __init__(self, names: Iterable[str], patience: Timeouts, now: float) -> None:
        self._patience = patience
        self._began = self._ticked = now
        self._watches = {name: _Watch(now, restart_at=now) for name in names}
        self.unneeded: set[str] = set()
        """Parts that the server can do without: kept alive as others are, but never waited for or given up."""

    @property
    def all_ready(self) -> bool:
        """Every part that is needed is ready now."""
        return all(name in self.unneeded or watch.ready is not None for name, watch in self._watches.items())

    def heard(self, name: str, now: float, heartbeat: Heartbeat | None = None) -> list[Action]:
        """A part spoke. A step far older than any before it is stuck, though heartbeats go on."""
        watch = self._running(name)
        if watch is None:
            return []
        watch.heard = now
        if heartbeat is None:
            return []
        watch.phase = heartbeat.phase
        if not is_stuck(heartbeat):
            return []
        return self._kill(name, watch, f"stuck in one step for {heartbeat.step_age:.0f} s")

    def ready(self, name: str, now: float) -> None:
        """A part can take work."""
        if watch := self._running(name):
            watch.heard = watch.ready = now
            watch.ever_ready = True

    def exited(self, name: str, code: int, last_words: str, now: float) -> list[Action]:
        """A part's process is gone: schedule its next one, or give up. Only what was never ready is given up."""
        watch = self._watches[name]
        left = code == 0 and watch.ready is not None and now - watch.ready >= self._patience.settled
        watch.deaths += not left
        how = watch.killed_for or describe_exit(code, last_words)
        if not watch.ever_ready and code == EXIT_CONFIG and name not in self.unneeded:
            return [GiveUp(f"{name}: {last_words or describe_exit(code)}", EXIT_CONFIG)]
        if not watch.ever_ready and watch.deaths >= self._patience.attempts and name not in self.unneeded:
            return [GiveUp(f"{name} died {watch.deaths} times before it was ready: {how}", 1)]
        wait = 0.0 if left else self._backoff(watch)
        watch.restart_at = now + wait
        watch.heard = watch.phase = watch.ready = None
        watch.killed_for, watch.told_slow = "", False
        return [Later(name, how, wait, left)]

    def _backoff(self, watch: _Watch) -> float:
        """Seconds until the next start: none after the first death of a part that has served, then more each time."""
        doublings = watch.deaths - 1 - watch.ever_ready
        return (
            0.0
            if doublings < 0
            else min(self._patience.backoff_cap, self._patience.backoff * 2.0 ** min(doublings, 30))
        )

    def tick(self, now: float) -> list[Action]:
        """What is due by now. Call it at `deadline`, and at least every second."""
        if (slept := now - self._ticked) > self._patience.own_pause:
            self._began += slept
            for watch in self._watches.values():
                watch.started += slept
                watch.heard = None if watch.heard is None else now
        self._ticked = now
        actions: list[Action] = []
        for name, watch in self._watches.items():
            actions += self._due(name, watch, now)
        return actions

    @property
    def deadline(self) -> float:
        """When somebody is to be started, or will have been silent for too long, if nothing happens before."""
        return min(map(self._deadline_of, self._watches.values()), default=float("inf"))

    def _deadline_of(self, watch: _Watch) -> float:
        if watch.restart_at is not None:
            return watch.restart_at
        if watch.heard is None or watch.killed_for:
            return float("inf")
        return watch.heard + self._silence_of(watch)

    def _silence_of(self, watch: _Watch) -> float:
        return self._patience.loading_silence if watch.ready is None else self._patience.silence

    def _due(self, name: str, watch: _Watch, now: float) -> list[Action]:
        patience = self._patience
        if watch.restart_at is not None:
            if now < watch.restart_at:
                return []
            watch.restart_at, watch.started = None, now
            return [Start(name)]
        if watch.ready is not None and now - watch.ready > patience.forgiven_after:
            watch.deaths = 0
        if watch.heard is not None and now - watch.heard > self._silence_of(watch):
            return self._kill(name, watch, f"no heartbeat for {now - watch.heard:.0f} s")
        if watch.ready is None and now - (watch.started if watch.ever_ready else self._began) > patience.startup:
            if watch.ever_ready:
                return self._kill(name, watch, f"not ready {patience.startup:g} s after its restart")
            if name in self.unneeded:
                return []
            state = watch.state(now)
            return [GiveUp(f"{name} was not ready within {patience.startup:g} s (--startup-timeout): {state}", 1)]
        slow = watch.ready is None and not watch.told_slow and name not in self.unneeded
        if slow and now - watch.started > patience.loading_silence:
            watch.told_slow = True
            return [Slow(name, f"not ready {now - watch.started:.0f} s after its start: {watch.state(now)}")]
        return []

    def _kill(self, name: str, watch: _Watch, reason: str) -> list[Action]:
        if watch.killed_for:
            return []
        watch.killed_for = reason
        return [Kill(name, reason)]

    def _running(self, name: str) -> _Watch | None:
        watch = self._watches.get(name)
        return None if watch is None or watch.restart_at is not None else watch
