"""Description of tools for the model: by its chat template, or as instructions if the template has no tools."""

from collections.abc import Sequence
from typing import Any

from tercet.frontend.json_number import json_text
from tercet.frontend.parsers.call_writer import example_call
from tercet.frontend.parsers.port import ToolSpec
from tercet.frontend.parsers.registry import tool_format

_INSTRUCTIONS = """\
You can call these tools:
{tools}
To call tools, answer with {form} and nothing else: {call}"""

_ANY_TOOL = "the tool's name"


def for_template(tools: Sequence[ToolSpec]) -> list[dict[str, Any]]:
    """Convert tools to the form that chat templates read."""
    return [{"type": "function", "function": _function(tool)} for tool in tools]


def with_instructions(
    messages: list[dict[str, Any]], tools: Sequence[ToolSpec], notation: str | None = None
) -> list[dict[str, Any]]:
    """Append instructions on the tools, and on calls in this notation, to the first system message."""
    listed = "\n".join(json_text(_function(tool), ensure_ascii=False) for tool in tools)
    call = example_call(tool_format(notation or "generic").framing, _ANY_TOOL)
    text = _INSTRUCTIONS.format(tools=listed, call=call, form="a JSON array" if call.startswith("[{") else "this")
    first = messages[0]
    if first["role"] not in {"system", "developer"}:
        return [{"role": "system", "content": text}, *messages]
    content = first["content"]
    text_so_far = content if isinstance(content, str) else "".join(part["text"] for part in content)
    return [{**first, "content": f"{text_so_far}\n\n{text}"}, *messages[1:]]


def _function(tool: ToolSpec) -> dict[str, Any]:
    """Return the function in OpenAI's order of fields, on which models were trained."""
    described = {"description": tool.description} if tool.description else {}
    return {"name": tool.name, **described, "parameters": tool.parameters or {"type": "object", "properties": {}}}
