"""Conversion of chat messages to the form that templates read. Raises BadRequestError for inconsistent calls."""

from collections.abc import Iterator
from typing import Any

import orjson

from tercet.frontend.errors import BadRequestError
from tercet.frontend.http.json_depth import MAX_JSON_DEPTH, is_within
from tercet.frontend.json_number import parse_json

Message = dict[str, Any]

MAX_MARKS = 131_072
"""Maximum brackets, colons and commas in a call's arguments, including those inside strings. The arguments are JSON
within the JSON body, and are parsed as well."""
MAX_MARKS_TOTAL = 524_288
"""Maximum for all calls of a history together."""
NO_OBJECT = "invalid_json"
"""Key for arguments that are not an object: templates expect one."""


def history(messages: list[Message]) -> list[Message]:
    """Convert messages: arguments of calls become objects, and results get the name of their tool.

    The input of a custom tool becomes its only argument. The legacy `function_call`, and its result with the role
    "function", become a tool call and its result.
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
    """Refuse tool-call arguments that are expensive to parse. Raises BadRequestError."""
    total = 0
    for place, message in enumerate(messages):
        calls = [call["function"] for call in message.get("tool_calls") or () if "function" in call]
        for call in [*calls, message.get("function_call") or {}]:
            marks = sum(map((call.get("arguments") or "").count, "{[:,"))
            total += marks
            if marks > MAX_MARKS or total > MAX_MARKS_TOTAL:
                what, most = ("a call", MAX_MARKS) if marks > MAX_MARKS else ("all calls", MAX_MARKS_TOTAL)
                where = f"messages[{place}]"
                raise BadRequestError(
                    f"The arguments of {what} have more than {most} brackets, colons and commas.", param=where
                )


def _assistant(message: Message, calls: list[Message]) -> Message:
    """Convert an assistant message; a refusal becomes its content."""
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
        # Every template accepts nine letters and digits as an id.
        yield _call(f"call{place:05d}", legacy["name"], _arguments(legacy.get("arguments"), where))


def _call(call_id: str, name: str, arguments: dict[str, Any]) -> Message:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def _arguments(text: str | None, where: str) -> dict[str, Any]:
    """Parse arguments to an object; missing ones become an empty object.

    A model may have written invalid arguments, and reads them again together with the tool's error message.
    """
    if not text or not text.strip():
        return {}
    try:
        value = parse_json(text)
    except orjson.JSONDecodeError:
        value = None
    if not isinstance(value, dict):
        return {NO_OBJECT: text}
    if not is_within(value, MAX_JSON_DEPTH):
        raise BadRequestError(f"'{where}' must be a JSON object of {MAX_JSON_DEPTH} levels at the most.", param=where)
    return value


def _result(message: Message, call_id: str, called: dict[str, str], place: int) -> Message:
    if call_id not in called:
        raise BadRequestError(
            f"'messages[{place}].tool_call_id' must be the id of a tool call in a message before it.",
            param=f"messages[{place}].tool_call_id",
        )
    return {"name": called[call_id], **message}


def _function_result(message: Message, called: dict[str, str], place: int) -> Message:
    """Convert a legacy function result to the result of the last call of that function."""
    matching = [call_id for call_id, name in called.items() if name == message["name"]]
    if not matching:
        raise BadRequestError(
            f"'messages[{place}].name' must be a function that a message before it calls.",
            param=f"messages[{place}].name",
        )
    return {"role": "tool", "name": message["name"], "tool_call_id": matching[-1], "content": message["content"] or ""}
