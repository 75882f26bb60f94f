"""Numbered events of one response."""

from collections.abc import Iterable, Sequence
from typing import Any

from tercet.frontend.api.responses.output_items import Change
from tercet.frontend.http.sse import named_event
from tercet.frontend.json_number import dump_json

ENDS = frozenset({"response.completed", "response.incomplete", "response.failed"})
"""Types of the last event of a response."""

_TEXT_OF_CALL = {"function_call": "arguments", "custom_tool_call": "input"}


class EventLog:
    """Numbers the events of a response. A resumed one omits the events that are in `earlier`.

    A resumed response has the same content, but its text is cut into other deltas. Each character of a delta counts as
    one step, and so does each other event. As many steps as `earlier` has are skipped, except the last event.
    """

    def __init__(self, earlier: Sequence[Change] = ()) -> None:
        self.next = len(earlier)
        self._skip = sum(_steps(change) for change in earlier)

    def add(self, changes: Iterable[Change]) -> list[Change]:
        """Return the new events, with their numbers."""
        numbered = []
        for change in changes:
            steps = _steps(change)
            skipped = min(steps, self._skip)
            self._skip -= skipped
            if skipped == steps and change["type"] not in ENDS:
                continue
            if 0 < skipped < steps:
                change = {**change, "delta": change["delta"][skipped:]}
            numbered.append({**change, "sequence_number": self.next})
            self.next += 1
        return numbered


def items_from_events(events: Iterable[Change]) -> list[dict[str, Any]]:
    """Return the output items that the events describe, as far as they got. They share objects with the events."""
    items: list[dict[str, Any]] = []
    texts: list[str] = []
    for event in events:
        match event["type"]:
            case "response.output_item.added":
                items.append(event["item"] | {"status": "incomplete"})
            case "response.content_part.added":
                items[-1]["content"] = [event["part"]]
            case "response.output_item.done":
                items[-1] = event["item"]
                texts.clear()
        if "delta" in event:
            texts.append(event["delta"])
            if event.get("logprobs"):
                items[-1]["content"][0]["logprobs"] += event["logprobs"]
    if texts:
        last, field = items[-1], _TEXT_OF_CALL.get(items[-1]["type"])
        if field is None:
            last, field = last["content"][0], "text"
        last[field] = "".join(texts)
    return items


def _steps(change: Change) -> int:
    delta: str | None = change.get("delta")
    return 1 if delta is None else len(delta)


def encoded(event: dict[str, Any]) -> bytes:
    """Return an event in server-sent form, with its type as its name."""
    return named_event(event["type"], dump_json(event))
