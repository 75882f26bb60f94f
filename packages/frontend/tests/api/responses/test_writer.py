"""Items and events of responses, from parsed output."""

import itertools
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tercet.frontend.api.responses.event_log import EventLog
from tercet.frontend.api.responses.output_items import Change
from tercet.frontend.api.responses.writer import ResponseObjectWriter
from tercet.frontend.errors import BadRequestError, ServerError
from tercet.frontend.parsers.events import (
    Event,
    ReasoningDelta,
    TextDelta,
    ToolArgumentsDelta,
    ToolCallEnd,
    ToolCallStart,
)
from tercet.protocol.messages.values import FinishType

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
    ToolCallStart(1, "time", "call_2"),
    ToolArgumentsDelta(1, "{}"),
    ToolCallEnd(1),
    ToolCallStart(2, "patch", "call_3", custom=True),
    ToolArgumentsDelta(2, "*** Begin", custom=True),
    ToolArgumentsDelta(2, ' "x"\n', custom=True),
    ToolCallEnd(2),
]


def body(status: str = "in_progress") -> dict[str, Any]:
    return {"id": "resp_1", "status": status, "output": [], "tools": [], "usage": None}


def told(writer: ResponseObjectWriter, said: list[Event], finish: FinishType = FinishType.STOP) -> list[Change]:
    changes = [*writer.begin(), *writer.progress()]
    for each in said:
        changes += writer.add([each])
    return changes + writer.end(finish, {"output_tokens": 1}, 7)


def test_reasoning_text_and_calls_become_items_of_their_own() -> None:
    writer = ResponseObjectWriter(body())
    told(writer, SAID)
    reasoning, message, weather, time, patch = writer.body["output"]
    assert reasoning["content"] == [{"type": "reasoning_text", "text": "hmm, rain?"}]
    assert message["content"][0]["text"] == "\n\nI look."
    assert (weather["name"], weather["call_id"], weather["arguments"]) == ("weather", "call_1", '{"city":"Oslo"}')
    assert (time["name"], time["arguments"]) == ("time", "{}")
    assert patch["id"].startswith("ctc_")
    assert {key: patch[key] for key in patch.keys() - {"id", "status"}} == {
        "type": "custom_tool_call",
        "call_id": "call_3",
        "name": "patch",
        "input": '*** Begin "x"\n',
    }
    assert {item["status"] for item in writer.body["output"]} == {"completed"}
    assert len({item["id"] for item in writer.body["output"]}) == 5
    assert (writer.body["status"], writer.body["completed_at"]) == ("completed", 7)


def test_every_item_is_opened_filled_and_closed_once() -> None:
    changes = told(ResponseObjectWriter(body()), SAID)
    for place in range(5):
        own = [change["type"].removeprefix("response.") for change in changes if change.get("output_index") == place]
        assert (own[0], own[-1]) == ("output_item.added", "output_item.done")
        assert own.count("output_item.added") == own.count("output_item.done") == 1
        assert sum(name.endswith(".delta") for name in own) == 2 - (place in {1, 3})
    opened = [change["item"] for change in changes if change["type"] == "response.output_item.added"]
    assert {item["status"] for item in opened} == {"in_progress"}


def test_what_a_cut_leaves_open_is_incomplete() -> None:
    writer = ResponseObjectWriter(body())
    changes = told(writer, SAID[:6], FinishType.LENGTH)
    assert [item["status"] for item in writer.body["output"]] == ["completed", "completed", "incomplete"]
    assert writer.body["output"][2]["arguments"] == '{"city":'
    assert changes[-1]["type"] == "response.incomplete"
    assert writer.body["incomplete_details"] == {"reason": "max_output_tokens"}


def test_a_call_that_a_stop_string_cut_off_is_incomplete() -> None:
    writer = ResponseObjectWriter(body())
    changes = told(writer, SAID[:6], FinishType.STOP)
    assert [item["status"] for item in writer.body["output"]] == ["completed", "completed", "incomplete"]
    assert changes[-1]["type"] == "response.completed"
    writer = ResponseObjectWriter(body())
    told(writer, [*SAID[:6], TextDelta("What was it?")], FinishType.STOP)
    assert [item["status"] for item in writer.body["output"]] == [*["completed"] * 2, "incomplete", "completed"]


@pytest.mark.parametrize("said", [[], [TextDelta(""), TextDelta(" \n")]])
def test_an_answer_of_nothing_is_a_message(said: list[Event]) -> None:
    writer = ResponseObjectWriter(body())
    told(writer, said)
    [message] = writer.body["output"]
    assert message["content"][0]["text"].strip() == ""


def test_a_failure_closes_what_is_open() -> None:
    writer = ResponseObjectWriter(body())
    writer.add([TextDelta("Hel")])
    changes = writer.fail(ServerError("it broke"))
    assert changes[-1]["response"]["error"] == {"code": "server_error", "message": "it broke"}
    assert changes[-1]["response"]["output"][0]["status"] == "incomplete"
    assert ResponseObjectWriter(body()).fail(BadRequestError("no"))[-1]["response"]["error"]["code"] == "invalid_prompt"


def test_an_event_tells_of_the_response_as_it_was_then() -> None:
    writer = ResponseObjectWriter(body("queued"))
    changes = told(writer, SAID)
    [created, queued, progress] = changes[:3]
    assert [each["response"]["status"] for each in (created, queued, progress)] == ["queued", "queued", "in_progress"]
    assert created["response"]["output"] == []
    assert changes[-1]["response"]["status"] == "completed"


def cut_again(data: st.DataObject, said: list[Event]) -> list[Event]:
    """Return the same events with their text cut into other pieces."""
    events: list[Event] = []
    for each in said:
        match each:
            case TextDelta(text):
                events += map(TextDelta, pieces(data, text))
            case ReasoningDelta(text):
                events += map(ReasoningDelta, pieces(data, text))
            case ToolArgumentsDelta(index, text, custom):
                events += [ToolArgumentsDelta(index, piece, custom) for piece in pieces(data, text)]
            case _:
                events.append(each)
    return events


def pieces(data: st.DataObject, text: str) -> list[str]:
    cuts = sorted(data.draw(st.sets(st.integers(1, len(text)))) | {0, len(text)})
    return [text[a:b] for a, b in itertools.pairwise(cuts)]


@settings(deadline=None)
@given(st.data())
def test_a_run_that_goes_on_from_another_repeats_and_loses_nothing(data: st.DataObject) -> None:
    first = EventLog().add(told(ResponseObjectWriter(body("queued")), cut_again(data, SAID)))
    kept = first[: data.draw(st.integers(0, len(first) - 1))]
    again = EventLog(kept).add(told(ResponseObjectWriter(body("queued")), cut_again(data, SAID)))
    whole = [*kept, *again]
    assert [event["sequence_number"] for event in whole] == list(range(len(whole)))
    for place, item in enumerate(whole[-1]["response"]["output"]):
        deltas = [event["delta"] for event in whole if "delta" in event and event["output_index"] == place]
        shown = item.get("arguments") or item.get("input") or item["content"][0]["text"]
        assert "".join(deltas) == shown
    assert [event["type"] for event in whole if "delta" not in event] == [
        event["type"] for event in first if "delta" not in event
    ]


def test_a_run_that_says_less_than_the_one_before_still_ends() -> None:
    kept = EventLog().add(told(ResponseObjectWriter(body()), SAID))[:-1]
    [last] = EventLog(kept).add(told(ResponseObjectWriter(body()), [TextDelta("no")]))
    assert (last["type"], last["sequence_number"]) == ("response.completed", len(kept))


def test_ids_follow_from_the_response_and_calls_keep_the_ids_already_told() -> None:
    first, second = ResponseObjectWriter(body()), ResponseObjectWriter(body(), {2: "call_told"})
    told(first, SAID)
    told(second, SAID)
    assert [item["id"] for item in first.body["output"]] == [item["id"] for item in second.body["output"]]
    assert second.body["output"][2]["call_id"] == "call_told"
    other = ResponseObjectWriter({**body(), "id": "resp_2"})
    told(other, SAID)
    assert other.body["output"][0]["id"] != first.body["output"][0]["id"]


def test_log_probabilities_go_with_the_text_they_are_of() -> None:
    writer = ResponseObjectWriter(body())
    entry = {"token": "a", "logprob": -1.0, "bytes": [97], "top_logprobs": []}
    [*_, delta] = writer.add([TextDelta("a")], [entry])
    assert delta["logprobs"] == [entry]
    writer.end(FinishType.STOP, {}, 0)
    assert writer.body["output"][0]["content"][0]["logprobs"] == [entry]
    held = ResponseObjectWriter(body())
    assert held.add([TextDelta("\n")], [entry]) == []
    [*_, late] = held.add([TextDelta("a")], [entry])
    assert (late["delta"], late["logprobs"]) == ("\na", [entry, entry]), "white space waits, and so do its own"


def test_log_probabilities_of_tokens_without_text_are_in_the_last_events() -> None:
    entry = {"token": "a", "logprob": -1.0, "bytes": [97], "top_logprobs": []}
    stopped = ResponseObjectWriter(body())
    stopped.add([TextDelta("a")], [entry])
    done, *_ = stopped.end(FinishType.STOP, {}, 0, [entry])
    assert (done["type"], done["logprobs"]) == ("response.output_text.done", [entry, entry])
    assert stopped.body["output"][0]["content"][0]["logprobs"] == [entry, entry]
    silent = ResponseObjectWriter(body())
    silent.end(FinishType.STOP, {}, 0, [entry])
    [message] = silent.body["output"]
    assert (message["content"][0]["text"], message["content"][0]["logprobs"]) == ("", [entry])
