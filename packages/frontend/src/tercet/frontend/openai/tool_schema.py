"""Tools and the choice among them, as chat requests write them; functions too, which tools were called first."""

from collections.abc import Iterable
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from tercet.frontend.errors import BadRequestError, UnsupportedParameterError
from tercet.frontend.openai.sampling_schema import Strict
from tercet.frontend.parsers.port import ToolSpec
from tercet.frontend.turn.chat_turn import Calls, ToolChoice

_MOST_TOOLS = 128


FunctionName = Annotated[str, Field(pattern="^[a-zA-Z0-9_-]{1,64}$")]


class Function(Strict):
    """A function of the client's that the model may call."""

    name: FunctionName
    description: Annotated[str, Field(max_length=65_536)] | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Strict):
    """A tool; of the types that OpenAI has, functions are supported."""

    type: Literal["function"]
    function: Function

    @model_validator(mode="before")
    @classmethod
    def _is_a_function(cls, tool: object) -> object:
        kind = tool.get("type") if isinstance(tool, dict) else None
        if kind != "function" and isinstance(kind, str):
            raise UnsupportedParameterError(
                f"Tools of the type {kind[:64]!r} are not supported, only functions.", param="tools"
            )
        return tool


class NamedFunction(Strict):
    """A function by its name."""

    name: FunctionName


class NamedTool(Strict):
    """A tool by its name."""

    type: Literal["function"]
    function: NamedFunction


class AllowedTools(Strict):
    """Some of the tools, and whether one of them has to be called."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool], Field(min_length=1, max_length=_MOST_TOOLS)]


class AllowedToolsChoice(Strict):
    """A choice among some of the tools."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


Choice = Literal["none", "auto", "required"]
Tools = Annotated[list[Tool], Field(max_length=_MOST_TOOLS)]
Functions = Annotated[list[Function], Field(max_length=_MOST_TOOLS)]
ToolChoiceField = Choice | Annotated[NamedTool | AllowedToolsChoice, Field(discriminator="type")]


def specs_of(functions: Iterable[Function]) -> tuple[ToolSpec, ...]:
    """Functions as the rest of the frontend knows them."""
    return tuple(
        ToolSpec(each.name, each.parameters or {}, each.description or "", strict=bool(each.strict))
        for each in functions
    )


class ToolFields(Strict):
    """The fields of a chat request that are about tools."""

    tools: Tools | None = None
    tool_choice: ToolChoiceField | None = None
    parallel_tool_calls: bool | None = None
    functions: Functions | None = None
    function_call: Literal["none", "auto"] | NamedFunction | None = None

    @model_validator(mode="after")
    def _chooses_among_what_it_gives(self) -> "ToolFields":
        if self.tools and self.functions:
            raise BadRequestError("'functions' cannot be combined with 'tools'.", param="functions")
        if self.function_call is not None and not self.functions:
            raise BadRequestError("'function_call' is only allowed with 'functions'.", param="function_call")
        if self.tool_choice is not None and self.functions:
            raise BadRequestError("'tool_choice' is only allowed with 'tools'.", param="tool_choice")
        return self

    @property
    def speaks_of_functions(self) -> bool:
        """Whether the client knows no tools: its answer has `function_call`."""
        return bool(self.functions)

    @property
    def names_one(self) -> bool:
        """Whether one tool has to be called, which is no reason of its own to finish."""
        return isinstance(self.tool_choice, NamedTool) or isinstance(self.function_call, NamedFunction)

    @property
    def calls_several(self) -> bool:
        """Whether one answer may have more calls than one; a tool that is named is called exactly once."""
        return self.parallel_tool_calls is not False and not self.speaks_of_functions and not self.names_one

    def specs(self) -> tuple[ToolSpec, ...]:
        """Every tool of the request."""
        return specs_of([tool.function for tool in self.tools or ()] or self.functions or [])

    def choice(self) -> ToolChoice:
        """What may be called, and what must."""
        chosen = self.function_call if self.functions else self.tool_choice
        match chosen:
            case str(word):
                return ToolChoice(Calls(word))
            case NamedTool(function=NamedFunction(name=name)) | NamedFunction(name=name):
                return ToolChoice(Calls.REQUIRED, frozenset({name}))
            case AllowedToolsChoice(allowed_tools=allowed):
                return ToolChoice(Calls(allowed.mode), frozenset(each.function.name for each in allowed.tools))
        return ToolChoice()
