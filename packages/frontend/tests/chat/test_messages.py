"""Conversion of earlier messages and calls for templates."""

from typing import Any

import pytest

from tercet.frontend.chat.messages import history
from tercet.frontend.errors import BadRequestError

USER = {"role": "user", "content": "x"}
DEEP = '{"a":' * 70 + "1" + "}" * 70


def calling(*calls: tuple[str, str, str], **more: Any) -> dict[str, Any]:
    return {
        "role": "assistant",
        "tool_calls": [
            {"id": each, "type": "function", "function": {"name": name, "arguments": arguments}}
            for each, name, arguments in calls
        ],
        **more,
    }


def result(call_id: str, **more: Any) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call_id, "content": "done", **more}


def test_arguments_are_objects_and_results_know_their_tool() -> None:
    _, called, first, second = history(
        [USER, calling(("1", "f", '{"a": 1}'), ("2", "g", "")), result("2"), result("1")]
    )
    assert [call["function"] for call in called["tool_calls"]] == [
        {"name": "f", "arguments": {"a": 1}},
        {"name": "g", "arguments": {}},
    ]
    assert called["content"] == ""
    assert (first["name"], second["name"]) == ("g", "f")
    assert first["tool_call_id"] == "2"


@pytest.mark.parametrize("text", ['{"a": 1,}', "[1]", "3", DEEP[:-1]])
def test_arguments_that_are_no_object_are_told_as_they_are(text: str) -> None:
    called, answered = history([calling(("1", "f", text)), result("1")])
    assert called["tool_calls"][0]["function"]["arguments"] == {"invalid_json": text}
    assert answered["content"] == "done"


def test_functions_become_tools() -> None:
    _, called, answered = history(
        [
            USER,
            {"role": "assistant", "function_call": {"name": "f", "arguments": '{"a": 1}'}},
            {"role": "function", "name": "f", "content": "done"},
        ]
    )
    [call] = called["tool_calls"]
    assert call["function"] == {"name": "f", "arguments": {"a": 1}}
    assert "function_call" not in called
    assert answered == {"role": "tool", "name": "f", "tool_call_id": call["id"], "content": "done"}
    assert len(call["id"]) == 9
    assert call["id"].isalnum()


def test_what_the_assistant_said() -> None:
    said = history(
        [
            {"role": "assistant", "content": None, "refusal": "No."},
            {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}, {"type": "text", "text": "Yes."}]},
            {"role": "assistant", "content": "x", "reasoning": "hm"},
            {"role": "assistant", "content": "x", "reasoning_content": "hm", "reasoning": "other"},
        ]
    )
    assert said == [
        {"role": "assistant", "content": "No."},
        {"role": "assistant", "content": [{"type": "text", "text": "No."}, {"type": "text", "text": "Yes."}]},
        {"role": "assistant", "content": "x", "reasoning_content": "hm"},
        {"role": "assistant", "content": "x", "reasoning_content": "hm"},
    ]


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([USER, result("1")], "messages[1].tool_call_id"),
        ([calling(("1", "f", "{}")), result("2")], "messages[1].tool_call_id"),
        ([result("1"), calling(("1", "f", "{}"))], "messages[0].tool_call_id"),
        ([calling(("1", "f", "{}"), ("2", "f", DEEP))], "messages[0].tool_calls[1].function.arguments"),
        ([USER, {"role": "function", "name": "f", "content": "done"}], "messages[1].name"),
        (
            [{"role": "assistant", "function_call": {"name": "f", "arguments": DEEP}}],
            "messages[0].function_call.arguments",
        ),
    ],
)
def test_what_does_not_fit_is_refused_by_its_place(messages: list[dict[str, Any]], param: str) -> None:
    with pytest.raises(BadRequestError) as error:
        history(messages)
    assert error.value.param == param
