"""How a model is told of its tools: by its chat template, or in words where the template knows nothing of tools."""

import json
from collections.abc import Sequence
from typing import Any

from tercet.frontend.parsers.port import ToolSpec

_INSTRUCTIONS = """\
You can call these tools:
{tools}
To call tools, answer with a JSON array and nothing else: [{{"name": "the tool's name", "arguments": {{...}}}}]"""


def for_template(tools: Sequence[ToolSpec]) -> list[dict[str, Any]]:
    """The tools as chat templates read them."""
    return [{"type": "function", "function": _function(tool)} for tool in tools]


def with_instructions(messages: list[dict[str, Any]], tools: Sequence[ToolSpec]) -> list[dict[str, Any]]:
    """The messages with a word on the tools and on how to call them, at the end of the first system message."""
    listed = "\n".join(json.dumps(_function(tool), ensure_ascii=False) for tool in tools)
    text = _INSTRUCTIONS.format(tools=listed)
    first = messages[0]
    if first["role"] not in {"system", "developer"}:
        return [{"role": "system", "content": text}, *messages]
    content = first["content"]
    said = content if isinstance(content, str) else "".join(part["text"] for part in content)
    return [{**first, "content": f"{said}\n\n{text}"}, *messages[1:]]


def _function(tool: ToolSpec) -> dict[str, Any]:
    """OpenAI's order of fields, which is what models were taught."""
    described = {"description": tool.description} if tool.description else {}
    return {"name": tool.name, **described, "parameters": tool.parameters or {"type": "object", "properties": {}}}
