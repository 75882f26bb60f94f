"""Rules that the event stream of every response follows."""

from collections.abc import Sequence
from typing import Any

Event = dict[str, Any]

_DELTAS = {
    "response.output_text.delta": ("response.output_text.done", "text"),
    "response.reasoning_text.delta": ("response.reasoning_text.done", "text"),
    "response.function_call_arguments.delta": ("response.function_call_arguments.done", "arguments"),
    "response.custom_tool_call_input.delta": ("response.custom_tool_call_input.done", "input"),
}
_ENDS = {"response.completed", "response.incomplete", "response.failed"}


def checked(events: Sequence[Event], *, background: bool = False) -> Event:
    """Return the response of the last event. Fail if the events before do not lead to it."""
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    head = ["response.created", *(["response.queued"] if background else []), "response.in_progress"]
    assert [event["type"] for event in events[: len(head)]] == head
    assert [event["type"] in _ENDS for event in events] == [False] * (len(events) - 1) + [True]
    last: Event = events[-1]["response"]
    assert events[-1]["type"] == f"response.{last['status']}"
    items = _items(events[len(head) : -1])
    assert last["output"] == items
    assert len({item["id"] for item in items}) == len(items)
    for event in events[: len(head)]:
        changed = {"status", "output", "usage", "completed_at", "incomplete_details", "error"}
        assert event["response"]["output"] == []
        assert {k: v for k, v in event["response"].items() if k not in changed} == {
            k: v for k, v in last.items() if k not in changed
        }
    return last


def _items(events: Sequence[Event]) -> list[Event]:
    """Return the items that the events describe, in order."""
    items: list[Event] = []
    own: list[Event] = []
    for event in events:
        assert event["output_index"] == len(items)
        own.append(event)
        if event["type"] == "response.output_item.done":
            items.append(_item(own))
            own = []
    assert own == []
    return items


def _item(events: list[Event]) -> Event:
    added, *middle, done = events
    assert added["type"] == "response.output_item.added"
    begun: Event = added["item"]
    item: Event = done["item"]
    assert begun["status"] == "in_progress"
    assert item["status"] in {"completed", "incomplete"}
    assert (begun["id"], begun["type"]) == (item["id"], item["type"])
    assert {event["item_id"] for event in middle} == {item["id"]}
    if item["type"] == "function_call":
        assert begun["arguments"] == ""
        assert {**begun, "arguments": item["arguments"], "status": item["status"]} == item
        _text(middle, item["arguments"])
        assert middle[-1]["name"] == item["name"]
        return item
    if item["type"] == "custom_tool_call":
        assert begun["input"] == ""
        assert {**begun, "input": item["input"], "status": item["status"]} == item
        _text(middle, item["input"])
        return item
    assert begun["content"] == []
    assert {event["content_index"] for event in middle} == {0}
    [part] = item["content"]
    opening, *texts, closing = middle
    assert (opening["type"], closing["type"]) == ("response.content_part.added", "response.content_part.done")
    assert opening["part"]["text"] == ""
    assert closing["part"] == part
    _text(texts, part["text"])
    if item["type"] == "message":
        assert texts[-1]["logprobs"] == part["logprobs"]
        told = [each for event in texts[:-1] for each in event["logprobs"]]
        assert told == part["logprobs"][: len(told)]
    return item


def _text(events: list[Event], whole: str) -> None:
    """Check that deltas are not empty and add up to the text of the last event."""
    *deltas, done = events
    for delta in deltas:
        assert delta["delta"]
        assert _DELTAS[delta["type"]][0] == done["type"]
    field = next(name for kind, name in _DELTAS.values() if kind == done["type"])
    assert "".join(delta["delta"] for delta in deltas) == done[field] == whole
