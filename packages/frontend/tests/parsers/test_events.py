"""Neighbouring deltas of one kind become one."""

from tercet.frontend.parsers.events import (
    Event,
    ReasoningDelta,
    TextDelta,
    ToolArgumentsDelta,
    ToolCallEnd,
    ToolCallStart,
    join_deltas,
)


def test_only_neighbours_of_one_kind_are_merged() -> None:
    events: list[Event] = [
        ReasoningDelta("a"),
        ReasoningDelta("b"),
        TextDelta("c"),
        TextDelta("d"),
        ToolCallStart(0, "f"),
        ToolArgumentsDelta(0, "{"),
        ToolArgumentsDelta(0, "}"),
        ToolCallEnd(0),
        ToolCallStart(1, "g", "id"),
        ToolArgumentsDelta(1, "{}"),
        TextDelta("e"),
    ]
    assert join_deltas(events) == [
        ReasoningDelta("ab"),
        TextDelta("cd"),
        ToolCallStart(0, "f"),
        ToolArgumentsDelta(0, "{}"),
        ToolCallEnd(0),
        ToolCallStart(1, "g", "id"),
        ToolArgumentsDelta(1, "{}"),
        TextDelta("e"),
    ]
    assert join_deltas([ToolArgumentsDelta(0, "a"), ToolArgumentsDelta(1, "b")]) == [
        ToolArgumentsDelta(0, "a"),
        ToolArgumentsDelta(1, "b"),
    ]
    assert join_deltas([]) == []
