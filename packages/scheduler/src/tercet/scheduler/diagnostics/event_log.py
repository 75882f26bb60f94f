"""Event log of the core: each call and each plan as one JSON object a line.

`tools/replay.py` feeds the events to a fresh core and compares the plans. This proves that the core is deterministic
and makes a schedule inspectable afterwards.
"""

import errno
import logging
import os
from collections.abc import Callable, Iterator
from typing import BinaryIO

import msgspec

from tercet.protocol.backlog import Outgoing
from tercet.protocol.messages.messages import InternalState
from tercet.protocol.messages.values import Grammar, Held, Load, LoRAAdapter
from tercet.scheduler.core.config import CoreConfig
from tercet.scheduler.core.data_parallel.scheduler import AnyScheduler, core_of
from tercet.scheduler.core.events import Arrival
from tercet.scheduler.core.plan import Capacity, Plan, StepResult

logger = logging.getLogger(__name__)


class Started(msgspec.Struct, frozen=True, tag=True):
    """First event: the settings that the core was created with."""

    config: CoreConfig
    capacity: Capacity


class Handled(msgspec.Struct, frozen=True, tag=True):
    """Event of `handle`."""

    arrivals: list[Arrival]


class Excerpt(msgspec.Struct, frozen=True, tag=True):
    """Event after `Started` of a log that cannot be replayed: events before are missing, or tokens are."""

    dropped: int
    """Events that are missing before the next one."""
    redacted: bool
    reason: str


class Scheduled(msgspec.Struct, frozen=True, tag=True):
    """Event of `schedule`; `plan` is null if there was no work."""

    plan: Plan | None
    now: float = 0.0


class Committed(msgspec.Struct, frozen=True, tag=True):
    """Event of `commit`."""

    result: StepResult


Event = Started | Excerpt | Handled | Scheduled | Committed
Record = Callable[[Event], None]


class LogFile:
    """File of events. If it cannot be written, for example because the disk is full, recording stops."""

    def __init__(self, file: BinaryIO) -> None:
        self._file: BinaryIO | None = file
        self._encoder = msgspec.json.Encoder()

    def record(self, event: Event) -> None:
        if self._file is None:
            return
        line = self._encoder.encode(event) + b"\n"
        try:
            if self._file.write(line) < len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            self._file.flush()
        except OSError as error:
            logger.warning("event log: write failed, recording stops: error=%s", error.strerror)
            self._file = None


class RecordingScheduler:
    """Core that records each call. It has the interface of `Scheduler`."""

    def __init__(self, core: AnyScheduler, *records: Record) -> None:
        self._core = core
        self._records = records
        self._idle = False
        self._record(Started(core.config, core.capacity))

    @property
    def runnable(self) -> bool:
        return self._core.runnable

    @property
    def empty(self) -> bool:
        return self._core.empty

    def handle(self, *arrivals: Arrival) -> list[Outgoing]:
        self._record(Handled(list(arrivals)))
        self._idle = False
        return self._core.handle(*arrivals)

    def schedule(self, now: float = 0.0) -> Plan | None:
        """Record and return the plan; of consecutive calls without a plan only the first is recorded."""
        plan = self._core.schedule(now)
        if plan is not None or not self._idle:
            self._record(Scheduled(plan, now))
        self._idle = plan is None
        return plan

    def commit(self, result: StepResult) -> list[Outgoing]:
        self._record(Committed(result))
        self._idle = False
        return self._core.commit(result)

    def grammars(self) -> set[Grammar]:
        return self._core.grammars()

    def adapters(self) -> set[LoRAAdapter]:
        return self._core.adapters()

    def media(self) -> set[bytes]:
        return self._core.media()

    def load(self) -> Load:
        return self._core.load()

    def held(self) -> dict[str, Held]:
        return self._core.held()

    def internal_state(self, number: str, now: float) -> InternalState:
        return self._core.internal_state(number, now)

    def _record(self, event: Event) -> None:
        for record in self._records:
            record(event)


def read_events(file: BinaryIO) -> Iterator[Event]:
    """Yield the events of a log. Raises msgspec.DecodeError at an invalid line."""
    decoder = msgspec.json.Decoder(Event)
    for line in file:
        yield decoder.decode(line)


def replay(events: Iterator[Event]) -> Iterator[tuple[int, Plan | None, Plan | None]]:
    """Feed a log to a fresh core. Yield (line, recorded plan, plan derived now) for every call of `schedule`."""
    first = next(events)
    if not isinstance(first, Started):
        raise ValueError("the log does not begin with Started")
    core = core_of(first.config, first.capacity)
    for line, event in enumerate(events, start=2):
        match event:
            case Handled(arrivals):
                core.handle(*arrivals)
            case Scheduled(plan, now):
                yield line, plan, core.schedule(now)
            case Committed(result):
                core.commit(result)
            case Started():
                core = core_of(event.config, event.capacity)
            case Excerpt(dropped, redacted, reason):
                gaps = f"{dropped} earlier events are missing, tokens are {'redacted' if redacted else 'complete'}"
                raise ValueError(f"an excerpt cannot be replayed: {gaps}: {reason}")
