"""Options of a chat request, independent of the endpoint."""

from enum import StrEnum
from typing import Any

import msgspec

from tercet.frontend.constraints import Constraint
from tercet.frontend.manager.request import GenerationOptions
from tercet.frontend.parsers.port import ToolSpec


class Calls(StrEnum):
    """Permission or obligation to call tools."""

    NONE = "none"
    AUTO = "auto"
    REQUIRED = "required"


class ToolChoice(msgspec.Struct, frozen=True):
    """Choice of tools that the answer may call. A single named tool is REQUIRED with one name."""

    calls: Calls = Calls.AUTO
    names: frozenset[str] | None = None
    """Allowed tools; None means all."""
    customs: frozenset[str] = frozenset()
    """Tools among `names` that are selected as custom tools."""


class ChatOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options of one answer. Values are within the API's bounds.

    `messages` have the form of OpenAI's API: role, content (text or text parts), tool_calls with arguments as JSON text
    or the input of a custom tool, tool_call_id, reasoning_content. `tercet.frontend.chat.messages` validates them and
    converts them for templates.
    """

    messages: list[dict[str, Any]]
    options: GenerationOptions = GenerationOptions()
    tools: tuple[ToolSpec, ...] = ()
    tool_choice: ToolChoice = ToolChoice()
    parallel_tool_calls: bool = True
    constraint: Constraint | None = None
    """Constraint on an answer without tool calls, after its reasoning."""
    reasoning_effort: str | None = None
    """Reasoning effort in OpenAI's terms; "none" disables reasoning."""
    effort_needs_reasoning: bool = True
    """Refuse an effort if the model does not reason; otherwise ignore it."""
    thinking: bool | None = None
    """Switch for models with optional reasoning; None keeps the model's default."""
    thinking_budget: int | None = None
    """Maximum tokens of reasoning."""
    template_kwargs: dict[str, Any] = {}
    """Additional template variables, which override those from effort and thinking."""
    add_generation_prompt: bool = True
    continue_final_message: bool = False

    @property
    def callable_tools(self) -> tuple[ToolSpec, ...]:
        choice = self.tool_choice
        if choice.calls is Calls.NONE:
            return ()
        return tuple(tool for tool in self.tools if choice.names is None or tool.name in choice.names)
