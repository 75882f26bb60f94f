"""Conversion of response items to chat messages."""

import secrets
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from tercet.frontend.api.responses.input_schema import IMAGES, InputItem
from tercet.frontend.api.responses.namespaces import flat_name
from tercet.frontend.errors import BadRequestError

Item = dict[str, Any]
Message = dict[str, Any]
Find = Callable[[str], Awaitable[Item | None]]
"""Returns the stored item with an id."""

_PREFIXES = {
    "message": "msg",
    "reasoning": "rs",
    "function_call": "fc",
    "function_call_output": "fco",
    "custom_tool_call": "ctc",
    "custom_tool_call_output": "ctco",
}
_ANSWERED = {"function_call_output": "function_call", "custom_tool_call_output": "custom_tool_call"}
"""Types of tool outputs, with the type of the call that each belongs to."""


def to_stored_item(item: Item) -> Item:
    """Return an item as it is stored and shown: with an id, a status, and its text in parts."""
    item = {key: value for key, value in item.items() if value is not None}
    item.setdefault("id", f"{_PREFIXES[item['type']]}_{secrets.token_hex(24)}")
    item.setdefault("status", "completed")
    match item["type"]:
        case "message":
            kind = "output_text" if item["role"] == "assistant" else "input_text"
            content = item["content"]
            parts = [{"type": kind, "text": content}] if isinstance(content, str) else content
            item["content"] = [_part(part, kind) for part in parts]
        case "reasoning":
            item.setdefault("summary", [])
    return item


async def resolve_items(items: Sequence[InputItem], param: str, find: Find) -> list[Item]:
    """Return the items of a request as they are stored, with references resolved.

    Raises BadRequestError for a reference to a missing item.
    """
    given: list[Item] = []
    for place, item in enumerate(items):
        if item.type != "item_reference":
            given.append(to_stored_item(item.model_dump(exclude_none=True)))
            continue
        found = await find(item.id)
        if found is None:
            raise BadRequestError(f"Item with id '{item.id}' not found.", param=f"{param}[{place}].id")
        given.append(found)
    return given


def _part(part: dict[str, Any], kind: str) -> dict[str, Any]:
    if part["type"] == "refusal":
        return part
    if part["type"] in IMAGES:
        return {"detail": "auto", **part}
    return {"annotations": [], **part, "type": kind} if kind == "output_text" else {"type": kind, "text": part["text"]}


def messages_of(earlier: Sequence[Item], given: Sequence[Item], instructions: str | None) -> list[Message]:
    """Return the chat messages of the items. Consecutive reasoning, text and calls form one assistant message.

    Raises BadRequestError for an output without a call.
    """
    messages: list[Message] = [{"role": "developer", "content": instructions}] if instructions else []
    called: set[tuple[str, str]] = set()
    answered = {item["call_id"] for item in (*earlier, *given) if item["type"] in _ANSWERED}
    for place, item in enumerate((*earlier, *given), -len(earlier)):
        match item["type"]:
            case "message" if item["role"] != "assistant":
                messages.append({"role": item["role"], "content": _content(item["content"], place, "content")})
            case "message":
                message = _assistant(messages, unless="tool_calls")
                message["content"] += text_of(item["content"])
            case "reasoning":
                message = _assistant(messages, unless="content")
                thought = text_of(item.get("content") or item["summary"])
                message["reasoning_content"] = message.get("reasoning_content", "") + thought
            case "function_call" | "custom_tool_call":
                if item.get("status") == "incomplete" and item["call_id"] not in answered:
                    continue  # cut off in its arguments, and therefore never made
                called.add((item["type"], item["call_id"]))
                _assistant(messages).setdefault("tool_calls", []).append(_call(item))
            case "function_call_output" | "custom_tool_call_output" as kind:
                if (_ANSWERED[kind], item["call_id"]) not in called:
                    raise BadRequestError(
                        f"No tool call found for {kind.replace('_', ' ')} with call_id {item['call_id']}.",
                        param=_param(place, "call_id"),
                    )
                output = _content(item["output"], place, "output")
                messages.append({"role": "tool", "tool_call_id": item["call_id"], "content": output})
    return messages


def text_of(content: str | list[dict[str, Any]]) -> str:
    """Return the text of an item's parts."""
    if isinstance(content, str):
        return content
    return "".join(part["refusal"] if part["type"] == "refusal" else part["text"] for part in content)


def _param(place: int, field: str) -> str:
    """Return the parameter of a field of an item. Items before those of the request have negative places."""
    return f"input[{place}].{field}" if place >= 0 else "conversation"


def _content(content: str | list[dict[str, Any]], place: int, field: str) -> str | list[dict[str, Any]]:
    """Return an item's parts as text, or as those of a chat if some are images, each with its parameter."""
    if isinstance(content, str) or all(part["type"] not in IMAGES for part in content):
        return text_of(content)
    parts = []
    for step, part in enumerate(content):
        url = part.get("image_url") or part.get("file_data")
        if url:
            parts.append({"type": "image_url", "image_url": {"url": url}, "param": _param(place, f"{field}[{step}]")})
        else:
            parts.append({"type": "text", "text": text_of([part])})
    return parts


def _assistant(messages: list[Message], unless: str | None = None) -> Message:
    """Return the assistant message under construction; a new one if that has the field `unless` already."""
    last = messages[-1] if messages else {}
    if last.get("role") != "assistant" or (unless is not None and last.get(unless)):
        messages.append({"role": "assistant", "content": ""})
    return messages[-1]


def _call(item: Item) -> dict[str, Any]:
    name = flat_name(item.get("namespace"), item["name"])
    if item["type"] == "custom_tool_call":
        return {"id": item["call_id"], "type": "custom", "custom": {"name": name, "input": item["input"]}}
    return {"id": item["call_id"], "type": "function", "function": {"name": name, "arguments": item["arguments"]}}
