"""Places at which chat templates read tools, found by rendering a probe.

Most read the variable `tools`. Some read a field of the system message: GLM-4 of 2024 a list, Phi-4-mini its JSON text.
"""

from collections.abc import Callable
from enum import StrEnum

from tercet.frontend.json_number import json_text
from tercet.frontend.model.message_form import PROBE_USER, Message

_PROBE = "tercet_probe_tool"
_PARAMETERS = {
    "type": "object",
    "properties": {"text": {"type": "string", "description": "Text."}},
    "required": ["text"],
}
PROBE_TOOLS = [{"type": "function", "function": {"name": _PROBE, "description": "Probe.", "parameters": _PARAMETERS}}]


class ToolPlace(StrEnum):
    """Place at which a template reads tools."""

    VARIABLE = "variable"
    WITH_SYSTEM = "variable, beside a system message"
    MESSAGE = "message"
    MESSAGE_TEXT = "message, as text"
    NOWHERE = "nowhere"


_IN_VARIABLE = {ToolPlace.VARIABLE, ToolPlace.WITH_SYSTEM}


def find_place(render: Callable[[list[Message], list[Message] | None], str | None]) -> ToolPlace:
    """Return where a template reads tools. `render` renders messages and tools; None if the template fails."""
    found = {
        place: render(place_tools([PROBE_USER], PROBE_TOOLS, place), PROBE_TOOLS if place in _IN_VARIABLE else None)
        for place in ToolPlace
    }
    if all(text is None for text in found.values()):
        return ToolPlace.VARIABLE  # the template refuses every probe
    return next((place for place, text in found.items() if _PROBE in (text or "")), ToolPlace.NOWHERE)


def place_tools(messages: list[Message], tools: list[Message] | None, place: ToolPlace) -> list[Message]:
    """Add a system message, and the tools in it, to a chat with tools if the template reads them there."""
    if not tools or place in {ToolPlace.VARIABLE, ToolPlace.NOWHERE}:
        return messages
    if messages[0]["role"] != "system":
        messages = [{"role": "system", "content": ""}, *messages]
    if place is ToolPlace.WITH_SYSTEM:
        return messages
    value = tools if place is ToolPlace.MESSAGE else json_text([tool["function"] for tool in tools], ensure_ascii=False)
    return [{**messages[0], "tools": value}, *messages[1:]]
