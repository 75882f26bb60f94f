"""Request schemas of tools, and of the choice among them, for /v1/responses."""

from collections.abc import Iterable, Iterator, Sequence, Set
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from tercet.frontend.api.openai.sampling_schema import Strict, refuse_field
from tercet.frontend.api.openai.tool_schema import InputGrammar
from tercet.frontend.api.responses.input_schema import ASYNC, Text
from tercet.frontend.api.responses.namespaces import flat_name
from tercet.frontend.chat.chat_request import Calls, ToolChoice
from tercet.frontend.chat.custom_calls import custom_tool
from tercet.frontend.errors import UnsupportedParameterError
from tercet.frontend.parsers.port import ToolSpec

_MAX_TOOLS = 1024

Anything = dict[str, Any]
ToolName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,128}$")]


class ClientTool(Strict):
    """Common fields of functions and custom tools."""

    name: ToolName
    description: Text | None = None
    allowed_callers: Annotated[list[Literal["direct", "programmatic"]], Field(max_length=8)] | None = Field(
        None, exclude=True
    )
    defer_loading: bool | None = Field(None, exclude=True)
    async_: bool | None = Field(None, alias="async", validation_alias=ASYNC, exclude=True)

    @model_validator(mode="after")
    def _refuse_unsupported_calling(self) -> "ClientTool":
        """Refuse options for tools that programs call, because only the model calls tools here.

        Schemas of outputs are accepted and ignored for the same reason.
        """
        refuse_field("allowed_callers", self.allowed_callers, harmless="direct" in (self.allowed_callers or ()))
        refuse_field("defer_loading", self.defer_loading, harmless=not self.defer_loading)
        refuse_field("async", self.async_, harmless=not self.async_)
        return self


class FunctionTool(ClientTool):
    """Function that the model may call."""

    type: Literal["function"]
    parameters: Anything | None = None
    strict: bool | None = None
    output_schema: Anything | None = Field(None, exclude=True)

    def spec(self, name: str, description: str, where: str) -> ToolSpec:
        """Return the specification; `where` is the tool's place in the request, for errors."""
        return ToolSpec(name, self.parameters or {}, description, bool(self.strict), param=f"{where}.parameters")


class TextFormat(Strict):
    """Input without a constraint."""

    type: Literal["text"]


class GrammarFormat(InputGrammar):
    """Input that matches a grammar."""

    type: Literal["grammar"]


class CustomTool(ClientTool):
    """Custom tool: its input is text."""

    type: Literal["custom"]
    format: Annotated[TextFormat | GrammarFormat, Field(discriminator="type")] = TextFormat(type="text")

    def spec(self, name: str, description: str, where: str) -> ToolSpec:
        """Return the specification; `where` is the tool's place in the request, for errors."""
        if isinstance(self.format, GrammarFormat):
            return custom_tool(name, description, self.format.constraint(f"{where}.format.definition"))
        return custom_tool(name, description)


class Namespace(Strict):
    """Group of tools with a common name."""

    type: Literal["namespace"]
    name: ToolName
    description: Text | None = None
    tools: Annotated[
        list[Annotated[FunctionTool | CustomTool, Field(discriminator="type")]],
        Field(min_length=1, max_length=_MAX_TOOLS),
    ]


class OfflineSearch(Strict):
    """Web search in OpenAI's cache. It is accepted and left out: there is no such cache here."""

    type: Literal["web_search"]
    external_web_access: Literal[False]
    filters: Any = None
    search_context_size: Any = None
    user_location: Any = None


AnyTool = Annotated[FunctionTool | CustomTool | Namespace | OfflineSearch, Field(discriminator="type")]
Tools = Annotated[list[AnyTool], Field(max_length=_MAX_TOOLS)]


class NamedTool(Strict):
    """Choice of a tool by name."""

    type: Literal["function", "custom"]
    name: ToolName


class AllowedTools(Strict):
    """Subset of the tools."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool], Field(min_length=1, max_length=_MAX_TOOLS)]


Choice = Literal["none", "auto", "required"] | Annotated[NamedTool | AllowedTools, Field(discriminator="type")]
_SUPPORTED = {"function", "custom"}


def supported_tools(tools: object) -> object:
    """Return the tools unchanged. Raises UnsupportedParameterError that names the first one of an unsupported type."""
    for place, tool in enumerate(tools if isinstance(tools, list) else ()):
        if not isinstance(tool, dict) or _searches_offline(tool):
            continue
        _refuse_others(tool, f"tools[{place}]", _SUPPORTED | {"namespace"})
        if isinstance(inner := tool.get("tools"), list):
            for step, each in enumerate(inner):
                _refuse_others(each, f"tools[{place}].tools[{step}]", _SUPPORTED)
    return tools


def supported_choice(choice: object) -> object:
    """Return the choice unchanged. Raises UnsupportedParameterError for an unsupported type."""
    kind = choice.get("type") if isinstance(choice, dict) else None
    if isinstance(kind, str) and kind not in _SUPPORTED | {"allowed_tools"}:
        raise UnsupportedParameterError(f"A choice of type '{kind}' is not supported.", param="tool_choice")
    return choice


def _searches_offline(tool: dict[str, Any]) -> bool:
    return tool.get("type") == "web_search" and tool.get("external_web_access") is False


def _refuse_others(tool: object, where: str, known: Set[str]) -> None:
    kind = tool.get("type") if isinstance(tool, dict) else None
    if isinstance(kind, str) and kind not in known:
        raise UnsupportedParameterError(f"Tools of type '{kind}' are not supported.", param=where)


def specs_of(tools: Iterable[AnyTool]) -> Iterator[ToolSpec]:
    """Yield the specifications of the tools under their flat names.

    The description of a namespace stands before that of its first tool.
    """
    for place, tool in enumerate(tools):
        where = f"tools[{place}]"
        if isinstance(tool, Namespace):
            namespace_description = tool.description
            for step, each in enumerate(tool.tools):
                full_description = "\n\n".join(text for text in (namespace_description, each.description) if text)
                yield each.spec(flat_name(tool.name, each.name), full_description, f"{where}.tools[{step}]")
                namespace_description = None
        elif not isinstance(tool, OfflineSearch):
            yield tool.spec(tool.name, tool.description or "", where)


def choice_of(choice: Choice | None) -> ToolChoice:
    """Return the allowed and required calls."""
    match choice:
        case NamedTool():
            return _choice_among(Calls.REQUIRED, [choice])
        case AllowedTools(mode=mode, tools=tools):
            return _choice_among(Calls(mode), tools)
        case str(word):
            return ToolChoice(Calls(word))
    return ToolChoice()


def _choice_among(calls: Calls, tools: Sequence[NamedTool]) -> ToolChoice:
    customs = frozenset(each.name for each in tools if each.type == "custom")
    return ToolChoice(calls, frozenset(each.name for each in tools), customs)
