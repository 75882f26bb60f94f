"""The messages of a chat as templates read them. Raises BadRequestError for calls and results that do not fit."""

from collections.abc import Iterator
from typing import Any

import orjson

from tercet.frontend.errors import BadRequestError
from tercet.frontend.http.json_depth import DEEPEST, is_within

Message = dict[str, Any]

MOST_MARKS = 131_072
"""Brackets, colons and commas that the arguments of a call may have, those in texts included: JSON within the JSON of a
body, which is parsed as well."""
MOST_MARKS_OF_ALL = 524_288
"""The same of all calls of a history."""
NO_OBJECT = "invalid_json"
"""The key under which templates, which want an object, find arguments that are none."""


def history(messages: list[Message]) -> list[Message]:
    """Messages in the form of today's templates: calls have objects for arguments, and results know their tool.

    Of a custom tool the input is the only argument. The old `function_call`, and its result with the role "function",
    become a call and the result of it.
    """
    _check_cost(messages)
    shaped: list[Message] = []
    called: dict[str, str] = {}
    for place, message in enumerate(messages):
        match message["role"]:
            case "assistant":
                calls = list(_calls(message, place))
                called |= {call["id"]: call["function"]["name"] for call in calls}
                shaped.append(_assistant(message, calls))
            case "tool":
                shaped.append(_result(message, message["tool_call_id"], called, place))
            case "function":
                shaped.append(_function_result(message, called, place))
            case _:
                shaped.append(message)
    return shaped


def _check_cost(messages: list[Message]) -> None:
    """Refuse arguments of calls that take long to parse, with a BadRequestError."""
    total = 0
    for place, message in enumerate(messages):
        calls = [call["function"] for call in message.get("tool_calls") or () if "function" in call]
        for call in [*calls, message.get("function_call") or {}]:
            marks = sum(map((call.get("arguments") or "").count, "{[:,"))
            total += marks
            if marks > MOST_MARKS or total > MOST_MARKS_OF_ALL:
                what, most = ("a call", MOST_MARKS) if marks > MOST_MARKS else ("all calls", MOST_MARKS_OF_ALL)
                where = f"messages[{place}]"
                raise BadRequestError(
                    f"The arguments of {what} have more than {most} brackets, colons and commas.", param=where
                )


def _assistant(message: Message, calls: list[Message]) -> Message:
    """What the assistant said; a refusal is what it said, too."""
    dropped = {"tool_calls", "function_call", "refusal", "reasoning", "content"}
    shaped = {key: value for key, value in message.items() if key not in dropped}
    if (reasoning := message.get("reasoning")) is not None:
        shaped.setdefault("reasoning_content", reasoning)
    content = message.get("content")
    if isinstance(content, list):
        content = [{"type": "text", "text": part.get("text") or part.get("refusal", "")} for part in content]
    shaped["content"] = message.get("refusal") or "" if content is None else content
    if calls:
        shaped["tool_calls"] = calls
    return shaped


def _calls(message: Message, place: int) -> Iterator[Message]:
    for number, call in enumerate(message.get("tool_calls") or ()):
        if custom := call.get("custom"):
            yield _call(call["id"], custom["name"], {"input": custom["input"]})
            continue
        where = f"messages[{place}].tool_calls[{number}].function.arguments"
        function = call["function"]
        yield _call(call["id"], function["name"], _arguments(function.get("arguments"), where))
    if legacy := message.get("function_call"):
        where = f"messages[{place}].function_call.arguments"
        # Nine letters and digits are an id to every template.
        yield _call(f"call{place:05d}", legacy["name"], _arguments(legacy.get("arguments"), where))


def _call(call_id: str, name: str, arguments: dict[str, Any]) -> Message:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def _arguments(text: str | None, where: str) -> dict[str, Any]:
    """Arguments as an object; none at all are an empty one.

    A model may have written what is none, and is to read it again beside the tool's complaint.
    """
    if not text or not text.strip():
        return {}
    try:
        value = orjson.loads(text)
    except orjson.JSONDecodeError:
        value = None
    if not isinstance(value, dict):
        return {NO_OBJECT: text}
    if not is_within(value, DEEPEST):
        raise BadRequestError(f"'{where}' must be a JSON object of {DEEPEST} levels at the most.", param=where)
    return value


def _result(message: Message, call_id: str, called: dict[str, str], place: int) -> Message:
    if call_id not in called:
        raise BadRequestError(
            f"'messages[{place}].tool_call_id' must be the id of a tool call in a message before it.",
            param=f"messages[{place}].tool_call_id",
        )
    return {"name": called[call_id], **message}


def _function_result(message: Message, called: dict[str, str], place: int) -> Message:
    """The result of the last call of that function."""
    matching = [call_id for call_id, name in called.items() if name == message["name"]]
    if not matching:
        raise BadRequestError(
            f"'messages[{place}].name' must be a function that a message before it calls.",
            param=f"messages[{place}].name",
        )
    return {"role": "tool", "name": message["name"], "tool_call_id": matching[-1], "content": message["content"] or ""}
