"""Content blocks and events of Anthropic messages, from parsed output."""

from typing import Any

import pytest

from tercet.frontend.api.anthropic.writer import Change, MessageWriter
from tercet.frontend.parsers.events import (
    Event,
    ReasoningDelta,
    TextDelta,
    ToolArgumentsDelta,
    ToolCallEnd,
    ToolCallStart,
)
from tercet.protocol.messages.values import FinishReason, FinishType

SAID: list[Event] = [
    ReasoningDelta("hmm, "),
    ReasoningDelta("rain?"),
    TextDelta("\n\n"),
    TextDelta("I look."),
    ToolCallStart(0, "weather", "call_1"),
    ToolArgumentsDelta(0, '{"city":'),
    ToolArgumentsDelta(0, '"Oslo"}'),
    ToolCallEnd(0),
    TextDelta("\n"),
    ToolCallStart(1, "time"),
    ToolCallEnd(1),
]
STOP = FinishReason(FinishType.STOP)


def told(writer: MessageWriter, said: list[Event], finish: FinishReason = STOP) -> list[Change]:
    changes = writer.begin({"output_tokens": 0})
    for each in said:
        changes += writer.add([each])
    return changes + writer.end(finish, {"output_tokens": 9})


def test_each_block_begins_is_filled_and_ends_before_the_next() -> None:
    writer = MessageWriter("msg_1", "m")
    changes = told(writer, SAID)
    blocks: list[Any] = writer.body["content"]
    assert [block["type"] for block in blocks] == ["thinking", "text", "tool_use", "tool_use"]
    assert (blocks[0]["thinking"], blocks[1]) == (
        "hmm, rain?",
        {"type": "text", "text": "\n\nI look.", "citations": None},
    )
    assert [(block["id"], block["input"]) for block in blocks[2:]] == [
        ("call_1", {"city": "Oslo"}),
        ("toolu_msg_1_3", {}),
    ]
    inside = [change for change in changes if change["type"].startswith("content_block")]
    assert [change["index"] for change in inside] == sorted(change["index"] for change in inside)
    for index in range(4):
        own = [change["type"] for change in inside if change["index"] == index]
        assert (own[0], own[-1]) == ("content_block_start", "content_block_stop")
        assert own[1:-1] == ["content_block_delta"] * (len(own) - 2)
    starts = [change["content_block"] for change in inside if change["type"] == "content_block_start"]
    assert [starts[0]["thinking"], starts[1]["text"], starts[2]["input"]] == ["", "", {}]
    assert (writer.body["stop_reason"], writer.body["usage"]) == ("tool_use", {"output_tokens": 9})


def test_the_first_event_tells_of_a_message_without_content() -> None:
    changes = told(MessageWriter("msg_1", "m"), SAID)
    assert changes[0]["message"]["content"] == []
    assert changes[0]["message"]["stop_reason"] is None
    assert changes[-1] == {"type": "message_stop"}


def test_a_call_that_was_cut_off_has_no_input() -> None:
    writer = MessageWriter("msg_1", "m")
    told(writer, SAID[4:6], FinishReason(FinishType.LENGTH))
    assert writer.body["content"][0]["input"] == {}
    assert writer.body["stop_reason"] == "max_tokens"


@pytest.mark.parametrize(
    ("matched", "reason", "sequence"), [('"Oslo', "stop_sequence", '"Oslo'), (2, "end_turn", None)]
)
def test_a_call_without_its_end_asks_for_nothing(matched: int | str, reason: str, sequence: str | None) -> None:
    writer = MessageWriter("msg_1", "m")
    told(writer, [*SAID[4:8], *SAID[4:6]], FinishReason(FinishType.STOP, matched))
    assert [block["input"] for block in writer.body["content"]] == [{"city": "Oslo"}, {}]
    assert (writer.body["stop_reason"], writer.body["stop_sequence"]) == (reason, sequence)
    writer = MessageWriter("msg_1", "m")
    told(writer, [*SAID[4:6], TextDelta("What was it?")], FinishReason(FinishType.STOP, matched))
    assert (writer.body["stop_reason"], writer.body["stop_sequence"]) == (reason, sequence)


@pytest.mark.parametrize(
    ("said", "blocks"), [([], 0), ([TextDelta(" ")], 1), ([ReasoningDelta("a"), TextDelta("\n")], 1)]
)
def test_white_space_is_a_block_only_where_nothing_else_is(said: list[Event], blocks: int) -> None:
    writer = MessageWriter("msg_1", "m")
    told(writer, said)
    assert len(writer.body["content"]) == blocks
    assert writer.body["stop_reason"] == "end_turn"


def test_thoughts_that_are_not_to_be_told_leave_an_empty_block() -> None:
    writer = MessageWriter("msg_1", "m", include_thinking=False)
    changes = told(writer, SAID[:2])
    assert writer.body["content"][0]["thinking"] == ""
    assert [change["delta"]["type"] for change in changes if change["type"] == "content_block_delta"] == [
        "signature_delta"
    ]
