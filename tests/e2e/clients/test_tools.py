"""Tools through the real server and OpenAI's client in strict validation: calls are valid for any model."""

import json
import re
from typing import Any

import pytest
from openai import OpenAI

BOOK: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "book_table",
        "description": "Books a table at a restaurant",
        "parameters": {
            "type": "object",
            "properties": {
                "day": {"enum": ["monday", "friday", "sunday"]},
                "guests": {"type": "integer", "minimum": 1, "maximum": 12},
                "outside": {"type": "boolean"},
            },
            "required": ["day", "guests", "outside"],
            "additionalProperties": False,
        },
        "strict": True,
    },
}
CANCEL: dict[str, Any] = {"type": "function", "function": {"name": "cancel"}}
TOOLS = [BOOK, CANCEL]
NAMED = {"type": "function", "function": {"name": "book_table"}}
QUESTION: dict[str, Any] = {"role": "user", "content": "A table for four on Friday, please."}


def check(name: str | None, arguments: str) -> None:
    """Assert that a call matches its tool's schema."""
    values = json.loads(arguments)
    if name == "cancel":
        assert values == {}
        return
    assert name == "book_table"
    assert values.keys() == {"day", "guests", "outside"}
    assert values["day"] in {"monday", "friday", "sunday"}
    assert isinstance(values["outside"], bool)
    assert type(values["guests"]) is int
    assert 1 <= values["guests"] <= 12


def options(model: str, choice: Any, **more: Any) -> dict[str, Any]:
    chosen = {"tool_choice": choice, "parallel_tool_calls": False, "max_tokens": 300, "temperature": 1.0, "seed": 5}
    return {"model": model, "messages": [QUESTION], "tools": TOOLS, **chosen, **more}


@pytest.mark.parametrize(("choice", "finish"), [("required", "tool_calls"), (NAMED, "stop")], ids=["required", "named"])
def test_calls_that_are_required_are_valid(client: OpenAI, model: str, choice: Any, finish: str) -> None:
    answer = client.chat.completions.create(**options(model, choice, n=2))
    assert [each.index for each in answer.choices] == [0, 1]
    for each in answer.choices:
        assert (each.finish_reason, each.message.content) == (finish, None)
        [call] = each.message.tool_calls or []
        assert call.type == "function"
        check(call.function.name, call.function.arguments)
        assert choice == "required" or call.function.name == "book_table"


def test_streamed_calls_are_those_of_the_whole_answer(client: OpenAI, model: str) -> None:
    asked = options(model, "required", n=2)
    whole = client.chat.completions.create(**asked)
    names: dict[int, str | None] = {}
    arguments = {0: "", 1: ""}
    finishes: list[tuple[int, str]] = []
    for chunk in client.chat.completions.create(**asked, stream=True):
        for choice in chunk.choices:
            for delta in choice.delta.tool_calls or []:
                assert delta.index == 0
                assert delta.function is not None
                names.setdefault(choice.index, delta.function.name)
                arguments[choice.index] += delta.function.arguments or ""
            if choice.finish_reason:
                finishes.append((choice.index, choice.finish_reason))
    assert sorted(finishes) == [(0, "tool_calls"), (1, "tool_calls")]
    for each in whole.choices:
        [call] = each.message.tool_calls or []
        assert call.type == "function"
        assert (names[each.index], arguments[each.index]) == (call.function.name, call.function.arguments)


def test_a_result_goes_into_the_next_turn(client: OpenAI, model: str) -> None:
    first = client.chat.completions.create(**options(model, NAMED))
    said = first.choices[0].message
    [call] = said.tool_calls or []
    result = {"role": "tool", "tool_call_id": call.id, "content": "Booked."}
    messages = [QUESTION, said.model_dump(exclude_none=True), result]
    second = client.chat.completions.create(**options(model, "none", messages=messages, max_tokens=20))
    assert second.choices[0].message.content
    assert second.usage is not None
    assert first.usage is not None
    # The prompt contains the call and its result, but not the tools, which must not be called.
    assert second.usage.prompt_tokens != first.usage.prompt_tokens


def test_a_free_choice_is_words_or_valid_calls(client: OpenAI, model: str) -> None:
    answer = client.chat.completions.create(**options(model, "auto", n=4, max_tokens=60))
    for each in answer.choices:
        assert each.message.content or each.message.tool_calls
        for call in each.message.tool_calls or []:
            assert call.type == "function"
            if each.finish_reason == "tool_calls":
                check(call.function.name, call.function.arguments)


def test_calls_in_json_go_with_a_format(client: OpenAI, model: str) -> None:
    """An answer without calls has the format."""
    schema = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}
    named = {"name": "answer", "schema": {**schema, "additionalProperties": False}, "strict": True}
    asked = options(model, "auto", response_format={"type": "json_schema", "json_schema": named})
    [choice] = client.chat.completions.create(**asked).choices
    if choice.message.tool_calls:
        [call] = choice.message.tool_calls
        assert call.type == "function"
        check(call.function.name, call.function.arguments)
    else:
        assert json.loads(choice.message.content or "").keys() == {"ok"}


TIME = r'(mon|fri|sun)day "at"\n[0-9]{2}:[0-9]{2}'
CUSTOM: dict[str, Any] = {"name": "tell_time", "description": "Tells the time of a booking."}
REGEX = {"type": "grammar", "grammar": {"syntax": "regex", "definition": TIME}}


def test_the_input_of_a_custom_tool_matches_its_expression(client: OpenAI, model: str) -> None:
    tool = {"type": "custom", "custom": {**CUSTOM, "format": REGEX}}
    named = {"type": "custom", "custom": {"name": "tell_time"}}
    asked = options(model, named, tools=[*TOOLS, tool], n=2)
    whole = client.chat.completions.create(**asked)
    streamed = {0: "", 1: ""}
    lenient = OpenAI(base_url=client.base_url, api_key=client.api_key)  # its types of chunks know no custom tools
    for chunk in lenient.chat.completions.create(**asked, stream=True):
        for choice in chunk.choices:
            for delta in choice.delta.tool_calls or []:
                streamed[choice.index] += delta.to_dict()["custom"]["input"]
    for each in whole.choices:
        [call] = each.message.tool_calls or []
        assert call.type == "custom"
        assert re.fullmatch(TIME, call.custom.input)
        assert streamed[each.index] == call.custom.input


def test_any_text_goes_into_a_custom_tool_and_back(client: OpenAI, model: str) -> None:
    asked: dict[str, Any] = {"model": model, "tools": [{"type": "custom", **CUSTOM}], "temperature": 1.0}
    first = client.responses.create(
        **asked,
        input="When?",
        tool_choice={"type": "custom", "name": "tell_time"},
        max_output_tokens=300,
        extra_body={"seed": 7},
    )
    [call] = first.output
    assert call.type == "custom_tool_call"
    given: Any = [{"type": "custom_tool_call_output", "call_id": call.call_id, "output": "Told."}]
    second = client.responses.create(
        **asked, input=given, tool_choice="none", previous_response_id=first.id, max_output_tokens=20
    )
    assert second.output_text
