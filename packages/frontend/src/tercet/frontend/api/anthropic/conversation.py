"""Conversion of Anthropic's messages to chat messages."""

from collections.abc import Sequence
from typing import Any

from tercet.frontend.api.anthropic.schema import (
    Block,
    DocumentBlock,
    ImageBlock,
    Message,
    ReadBlock,
    RedactedThinkingBlock,
    SearchResultBlock,
    TextBlock,
    ThinkingBlock,
    Tool,
    ToolResultBlock,
    ToolUseBlock,
    text_of,
)
from tercet.frontend.errors import BadRequestError
from tercet.frontend.json_number import dump_json


def messages_of(system: str | Sequence[TextBlock] | None, messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Return the chat messages. Raises BadRequestError for a result of an unknown tool call."""
    text = text_of(system) if system else ""
    chat: list[dict[str, Any]] = [{"role": "system", "content": text}] if text else []
    call_ids: set[str] = set()
    for place, message in enumerate(messages):
        blocks = [TextBlock(type="text", text=message.content)] if isinstance(message.content, str) else message.content
        if message.role == "assistant":
            chat.append(_assistant(blocks, place))
            call_ids |= {block.id for block in blocks if isinstance(block, ToolUseBlock)}
        else:
            chat += _user_messages(message.role, blocks, call_ids, place)
    return chat


def _assistant(blocks: Sequence[Block], place: int) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": ""}
    for step, block in enumerate(blocks):
        match block:
            case TextBlock():
                message["content"] += block.text
            case ThinkingBlock():
                message["reasoning_content"] = message.get("reasoning_content", "") + block.thinking
            case RedactedThinkingBlock():
                pass  # only the server that wrote it can read it
            case ToolUseBlock():
                function = {"name": block.name, "arguments": dump_json(block.input).decode()}
                call = {"id": block.id, "type": "function", "function": function}
                message.setdefault("tool_calls", []).append(call)
            case ToolResultBlock():
                raise BadRequestError("The result of a tool is the user's to give.", param=_path(place, step))
            case _:
                raise BadRequestError(
                    f"A block of type '{block.type}' is the user's to give.", param=_path(place, step)
                )
    return message


def _user_messages(role: str, blocks: Sequence[Block], call_ids: set[str], place: int) -> list[dict[str, Any]]:
    """Return tool results as messages of their own, then the text and images."""
    chat: list[dict[str, Any]] = []
    read: list[tuple[str, ReadBlock | ImageBlock]] = []
    for step, block in enumerate(blocks):
        match block:
            case TextBlock() | DocumentBlock() | SearchResultBlock() | ImageBlock():
                read.append((f"messages.{place}.content.{step}", block))
            case ToolResultBlock():
                if block.tool_use_id not in call_ids:
                    raise BadRequestError(
                        f"No tool_use block before this has the id '{block.tool_use_id}'.",
                        param=f"{_path(place, step)}.tool_use_id",
                    )
                content = block.content or ""
                shown = [TextBlock(type="text", text=content)] if isinstance(content, str) else content
                where = f"messages.{place}.content.{step}.content"
                result = _content([(f"{where}.{number}", each) for number, each in enumerate(shown)])
                if block.is_error:
                    head = "Error: "
                    result = f"{head}{result}" if isinstance(result, str) else [_text(head), *result]
                chat.append({"role": "tool", "tool_call_id": block.tool_use_id, "content": result})
            case _:
                raise BadRequestError(
                    f"A block of type '{block.type}' is the assistant's to say.", param=_path(place, step)
                )
    if read or not chat:
        chat.append({"role": role, "content": _content(read)})
    return chat


def _content(blocks: Sequence[tuple[str, ReadBlock | ImageBlock]]) -> str | list[dict[str, Any]]:
    """Return blocks, each with its parameter, as text on lines of their own, and as parts if some are images."""
    parts: list[dict[str, Any]] = []
    lines: list[str] = []
    for param, block in blocks:
        if not isinstance(block, ImageBlock):
            lines.append(block.shown)
            continue
        parts += [_text("\n".join(lines))] if lines else []
        parts.append({"type": "image_url", "image_url": {"url": block.source.url}, "param": param})
        lines = []
    text = "\n".join(lines)
    return [*parts, _text(text)] if parts and lines else parts or text


def _text(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def tool_description(tool: Tool) -> str:
    """Return the description of a tool for the model, with its input examples."""
    lines = [tool.description] if tool.description else []
    if tool.input_examples:
        lines += ["Examples:", *(dump_json(each).decode() for each in tool.input_examples)]
    return "\n".join(lines)


def _path(place: int, step: int) -> str:
    return f"messages[{place}].content[{step}]"
