"""Conversion of Anthropic's messages to chat messages."""

from collections.abc import Sequence
from typing import Any

from tercet.frontend.api.anthropic.schema import (
    Block,
    DocumentBlock,
    Message,
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
    """Return tool results as messages of their own, then the text."""
    chat: list[dict[str, Any]] = []
    texts: list[str] = []
    for step, block in enumerate(blocks):
        match block:
            case TextBlock() | DocumentBlock() | SearchResultBlock():
                texts.append(block.shown)
            case ToolResultBlock():
                if block.tool_use_id not in call_ids:
                    raise BadRequestError(
                        f"No tool_use block before this has the id '{block.tool_use_id}'.",
                        param=f"{_path(place, step)}.tool_use_id",
                    )
                result = text_of(block.content) if block.content else ""
                if block.is_error:
                    result = f"Error: {result}"
                chat.append({"role": "tool", "tool_call_id": block.tool_use_id, "content": result})
            case _:
                raise BadRequestError(
                    f"A block of type '{block.type}' is the assistant's to say.", param=_path(place, step)
                )
    if texts or not chat:
        chat.append({"role": role, "content": "\n".join(texts)})
    return chat


def tool_description(tool: Tool) -> str:
    """Return the description of a tool for the model, with its input examples."""
    lines = [tool.description] if tool.description else []
    if tool.input_examples:
        lines += ["Examples:", *(dump_json(each).decode() for each in tool.input_examples)]
    return "\n".join(lines)


def _path(place: int, step: int) -> str:
    return f"messages[{place}].content[{step}]"
