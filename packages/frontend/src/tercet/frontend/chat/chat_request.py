"""What a client asks for in one turn of a chat, in the terms of no endpoint."""

from enum import StrEnum
from typing import Any

import msgspec

from tercet.frontend.constraints import Constraint
from tercet.frontend.manager.request import ParamNames
from tercet.frontend.parsers.port import ToolSpec
from tercet.protocol.messages.values import LogprobParams, SamplingParams


class Calls(StrEnum):
    """Whether the answer may, or has to, call tools."""

    NONE = "none"
    AUTO = "auto"
    REQUIRED = "required"


class ToolChoice(msgspec.Struct, frozen=True):
    """Which tools the answer may call. A named tool is REQUIRED with one name."""

    calls: Calls = Calls.AUTO
    names: frozenset[str] | None = None
    """Only these; None is every tool of the turn."""
    customs: frozenset[str] = frozenset()
    """Those among them that are chosen as custom tools."""


class ChatOptions(msgspec.Struct, frozen=True, kw_only=True):
    """One turn. Values are within the bounds of the API.

    `messages` are chat messages as OpenAI writes them: role, content (text or text parts), tool_calls with arguments
    as JSON text or the input of a custom tool, tool_call_id, reasoning_content. `tercet.frontend.chat.messages` checks
    them and gives them the form that templates read.
    """

    messages: list[dict[str, Any]]
    sampling: SamplingParams
    tools: tuple[ToolSpec, ...] = ()
    tool_choice: ToolChoice = ToolChoice()
    parallel_tool_calls: bool = True
    constraint: Constraint | None = None
    """What an answer that calls no tool has to be, once it has ended its reasoning."""
    reasoning_effort: str | None = None
    """One of OpenAI's words; "none" is no reasoning."""
    effort_needs_reasoning: bool = True
    """Whether a model that does not reason refuses an effort; else it has no effect on it."""
    thinking: bool | None = None
    """Whether to reason, for models that can be told; None leaves it to them."""
    thinking_budget: int | None = None
    """Tokens of reasoning after which it is ended."""
    template_kwargs: dict[str, Any] = {}
    """More variables for the template, which win over those that effort and thinking set."""
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    max_tokens: int | None = None
    seed: int | None = None
    stop: list[str] = []
    include_stop: bool = False
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    logprobs: LogprobParams | None = None
    prediction: str = ""
    """What the answer is expected to be."""
    priority: int = 0
    cache_salt: str = ""
    param_names: ParamNames = ParamNames()

    @property
    def callable_tools(self) -> tuple[ToolSpec, ...]:
        """The tools that this turn's answer may call."""
        choice = self.tool_choice
        if choice.calls is Calls.NONE:
            return ()
        return tuple(tool for tool in self.tools if choice.names is None or tool.name in choice.names)
