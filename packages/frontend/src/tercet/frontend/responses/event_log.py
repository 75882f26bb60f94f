"""The events of one response in order, each with its number."""

from collections.abc import Iterable, Sequence
from typing import Any

import orjson

from tercet.frontend.event_stream import named_event
from tercet.frontend.responses.output_items import Change

ENDS = frozenset({"response.completed", "response.incomplete", "response.failed"})
"""The last event of a response is one of these."""


class EventLog:
    """Numbers events. One that goes on after `earlier` leaves out what those have told, however they were cut.

    A response that is begun again says the same, but its text arrives in other pieces. Each character of a delta and
    each other event is one step; so many steps as `earlier` has are passed over, but never the last of all.
    """

    def __init__(self, earlier: Sequence[Change] = ()) -> None:
        self.next = len(earlier)
        self._told = sum(_steps(change) for change in earlier)

    def add(self, changes: Iterable[Change]) -> list[Change]:
        """The events that are new, with their numbers."""
        numbered = []
        for change in changes:
            steps = _steps(change)
            told = min(steps, self._told)
            self._told -= told
            if told == steps and change["type"] not in ENDS:
                continue
            if 0 < told < steps:
                change = {**change, "delta": change["delta"][told:]}
            numbered.append({**change, "sequence_number": self.next})
            self.next += 1
        return numbered


def _steps(change: Change) -> int:
    delta: str | None = change.get("delta")
    return 1 if delta is None else len(delta)


def encoded(event: dict[str, Any]) -> bytes:
    """An event as its client reads it: its type is its name."""
    return named_event(event["type"], orjson.dumps(event))
