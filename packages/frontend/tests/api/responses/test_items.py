"""Response items as chat messages."""

from typing import Any

import pytest

from tercet.frontend.api.responses.items import messages_of, to_stored_item
from tercet.frontend.errors import BadRequestError

CALL = {"type": "function_call", "call_id": "c1", "name": "f", "arguments": '{"a": 1}'}
RESULT = {"type": "function_call_output", "call_id": "c1", "output": "7"}
CALLED = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}


def message_item(role: str, text: str) -> dict[str, Any]:
    return to_stored_item({"type": "message", "role": role, "content": text})


def thought(text: str, **fields: Any) -> dict[str, Any]:
    return to_stored_item({"type": "reasoning", "content": [{"type": "reasoning_text", "text": text}], **fields})


def test_what_the_assistant_does_in_a_row_is_one_message() -> None:
    items = [
        message_item("user", "q"),
        thought("hm"),
        message_item("assistant", "I look."),
        CALL,
        RESULT,
        thought("so"),
        message_item("assistant", "7"),
    ]
    assert messages_of([], items, "be kind") == [
        {"role": "developer", "content": "be kind"},
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "I look.", "reasoning_content": "hm", "tool_calls": [CALLED]},
        {"role": "tool", "tool_call_id": "c1", "content": "7"},
        {"role": "assistant", "content": "7", "reasoning_content": "so"},
    ]


def test_text_after_a_call_and_thoughts_after_text_begin_a_new_message() -> None:
    messages = messages_of(
        [], [message_item("assistant", "a"), thought("b"), CALL, message_item("assistant", "c")], None
    )
    assert [(each["content"], "tool_calls" in each) for each in messages] == [("a", False), ("", True), ("c", False)]


def test_history_comes_first_and_errors_are_about_what_is_given() -> None:
    earlier = [message_item("user", "q"), CALL]
    assert [each["role"] for each in messages_of(earlier, [RESULT], None)] == ["user", "assistant", "tool"]
    with pytest.raises(BadRequestError) as error:
        messages_of(earlier, [message_item("user", "x"), {**RESULT, "call_id": "other"}], None)
    assert error.value.param == "input[1].call_id"


@pytest.mark.parametrize("arguments", ["[1]", "{", "7"])
def test_arguments_are_passed_on_whatever_the_model_wrote(arguments: str) -> None:
    [message] = messages_of([], [{**CALL, "arguments": arguments}], None)
    assert message["tool_calls"][0]["function"]["arguments"] == arguments


def test_a_call_that_was_cut_off_was_never_made() -> None:
    cut = {**CALL, "arguments": '{"a', "status": "incomplete"}
    assert messages_of([cut], [message_item("user", "go on")], None) == [{"role": "user", "content": "go on"}]


@pytest.mark.parametrize("stored", [False, True])
def test_a_call_that_was_cut_off_and_answered_all_the_same_is_one(stored: bool) -> None:
    cut = {**CALL, "arguments": '{"a', "status": "incomplete"}
    told = {**RESULT, "output": "Invalid JSON"}
    messages = messages_of([cut], [told], None) if stored else messages_of([], [cut, told], None)
    assert [each["role"] for each in messages] == ["assistant", "tool"]
    assert messages[0]["tool_calls"][0]["function"]["arguments"] == '{"a'


def test_items_are_kept_with_ids_and_parts_of_their_kind() -> None:
    mine, theirs = message_item("user", "q"), message_item("assistant", "a")
    assert mine["id"].startswith("msg_")
    assert mine["content"] == [{"type": "input_text", "text": "q"}]
    assert theirs["content"] == [{"type": "output_text", "text": "a", "annotations": []}]
    refused = to_stored_item(
        {"type": "message", "id": "m", "role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]}
    )
    assert (refused["id"], refused["content"]) == ("m", [{"type": "refusal", "refusal": "no"}])
    assert messages_of([], [refused], None) == [{"role": "assistant", "content": "no"}]
    summary = to_stored_item({"type": "reasoning", "summary": [{"type": "summary_text", "text": "s"}]})
    assert messages_of([], [summary], None) == [{"role": "assistant", "content": "", "reasoning_content": "s"}]
