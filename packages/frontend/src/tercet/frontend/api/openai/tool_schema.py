"""Request schemas of tools, of the older functions, and of the choice among them."""

from collections.abc import Iterable, Sequence
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from tercet.frontend.api.openai.sampling_schema import Strict
from tercet.frontend.chat.chat_request import Calls, ToolChoice
from tercet.frontend.chat.custom_calls import custom_tool
from tercet.frontend.constraints import Lark, Regex
from tercet.frontend.errors import BadRequestError, FieldError, UnsupportedParameterError
from tercet.frontend.parsers.port import ToolSpec
from tercet.frontend.structured_output.limits import MAX_TEXT

_MAX_TOOLS = 128


Description = Annotated[str, Field(max_length=65_536)]
FunctionName = Annotated[str, Field(pattern="^[a-zA-Z0-9_-]{1,64}$")]


class Function(Strict):
    """Function that the model may call."""

    name: FunctionName
    description: Description | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class TextFormat(Strict):
    """Input without a constraint."""

    type: Literal["text"]


class InputGrammar(Strict):
    """Grammar of the input of a custom tool."""

    syntax: Literal["lark", "regex"]
    definition: Annotated[str, Field(min_length=1, max_length=MAX_TEXT)]

    def constraint(self, param: str) -> Lark | Regex:
        """Return the grammar as a constraint; `param` is the parameter name of its definition."""
        if self.syntax == "lark":
            return Lark(text=self.definition, param=param)
        return Regex(pattern=self.definition, param=param)


class GrammarFormat(Strict):
    """Input that matches a grammar."""

    type: Literal["grammar"]
    grammar: InputGrammar


class Custom(Strict):
    """Custom tool: its input is text."""

    name: FunctionName
    description: Description | None = None
    format: Annotated[TextFormat | GrammarFormat, Field(discriminator="type")] | None = None


class FunctionTool(Strict):
    """Tool of type `function`."""

    type: Literal["function"]
    function: Function


class CustomTool(Strict):
    """Tool of type `custom`."""

    type: Literal["custom"]
    custom: Custom


class NamedFunction(Strict):
    """Name of a function or a custom tool."""

    name: FunctionName


class NamedTool(Strict):
    """Choice of a function by name."""

    type: Literal["function"]
    function: NamedFunction

    @property
    def name(self) -> str:
        return self.function.name


class NamedCustomTool(Strict):
    """Choice of a custom tool by name."""

    type: Literal["custom"]
    custom: NamedFunction

    @property
    def name(self) -> str:
        return self.custom.name


def _supported(tool: object) -> object:
    kind = tool.get("type") if isinstance(tool, dict) else None
    if isinstance(kind, str) and kind not in {"function", "custom"}:
        raise FieldError(
            f"Tools of the type {kind[:64]!r} are not supported, only functions and custom tools.",
            "type",
            error=UnsupportedParameterError,
        )
    return tool


AnyNamed = Annotated[NamedTool | NamedCustomTool, Field(discriminator="type")]


class AllowedTools(Strict):
    """Subset of the tools; `mode` says whether the model must call one."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[AnyNamed], Field(min_length=1, max_length=_MAX_TOOLS)]


class AllowedToolsChoice(Strict):
    """Choice among some of the tools."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


Choice = Literal["none", "auto", "required"]
Tool = Annotated[FunctionTool | CustomTool, Field(discriminator="type"), BeforeValidator(_supported)]
Tools = Annotated[list[Tool], Field(max_length=_MAX_TOOLS)]
Functions = Annotated[list[Function], Field(max_length=_MAX_TOOLS)]
ToolChoiceField = Choice | Annotated[NamedTool | NamedCustomTool | AllowedToolsChoice, Field(discriminator="type")]


def specs_of(tools: Iterable[FunctionTool | CustomTool]) -> tuple[ToolSpec, ...]:
    """Return the specifications of the tools."""
    return tuple(
        _function(tool.function, f"tools[{place}].function.parameters")
        if isinstance(tool, FunctionTool)
        else _custom(tool.custom, f"tools[{place}].custom.format.grammar.definition")
        for place, tool in enumerate(tools)
    )


def _function(each: Function, param: str) -> ToolSpec:
    return ToolSpec(each.name, each.parameters or {}, each.description or "", strict=bool(each.strict), param=param)


def _custom(each: Custom, param: str) -> ToolSpec:
    grammar = each.format.grammar.constraint(param) if isinstance(each.format, GrammarFormat) else None
    return custom_tool(each.name, each.description or "", grammar)


class ToolFields(Strict):
    """Fields of a chat request that concern tools."""

    tools: Tools | None = None
    tool_choice: ToolChoiceField | None = None
    parallel_tool_calls: bool | None = None
    functions: Functions | None = None
    function_call: Literal["none", "auto"] | NamedFunction | None = None

    @model_validator(mode="after")
    def _check_tool_fields(self) -> "ToolFields":
        if self.tools and self.functions:
            raise BadRequestError("'functions' cannot be combined with 'tools'.", param="functions")
        if self.function_call is not None and not self.functions:
            raise BadRequestError("'function_call' is only allowed with 'functions'.", param="function_call")
        if self.tool_choice is not None and self.functions:
            raise BadRequestError("'tool_choice' is only allowed with 'tools'.", param="tool_choice")
        return self

    @property
    def uses_functions(self) -> bool:
        """Return whether the client uses the older functions, so that the response has `function_call`."""
        return bool(self.functions)

    @property
    def names_tool(self) -> bool:
        """Return whether the client named the tool to call, in which case a call has no finish reason of its own."""
        named = (NamedTool, NamedCustomTool, NamedFunction)
        return isinstance(self.tool_choice, named) or isinstance(self.function_call, named)

    @property
    def allows_parallel_calls(self) -> bool:
        """Return whether the response may have several calls. A named tool is called exactly once."""
        return self.parallel_tool_calls is not False and not self.uses_functions and not self.names_tool

    def specs(self) -> tuple[ToolSpec, ...]:
        functions = enumerate(self.functions or ())
        return specs_of(self.tools or ()) or tuple(
            _function(each, f"functions[{place}].parameters") for place, each in functions
        )

    def choice(self) -> ToolChoice:
        """Return the allowed and required calls."""
        chosen = self.function_call if self.functions else self.tool_choice
        match chosen:
            case str(word):
                return ToolChoice(Calls(word))
            case NamedFunction(name=name):
                return ToolChoice(Calls.REQUIRED, frozenset({name}))
            case NamedTool() | NamedCustomTool():
                return _choice_among(Calls.REQUIRED, [chosen])
            case AllowedToolsChoice(allowed_tools=allowed):
                return _choice_among(Calls(allowed.mode), allowed.tools)
        return ToolChoice()


def _choice_among(calls: Calls, tools: Sequence[NamedTool | NamedCustomTool]) -> ToolChoice:
    customs = frozenset(each.name for each in tools if isinstance(each, NamedCustomTool))
    return ToolChoice(calls, frozenset(each.name for each in tools), customs)


def functions_param(param: str) -> str:
    """Return the name of a parameter of tools in a request with the older functions."""
    return (
        param.replace("tools", "functions", 1).replace(".function.", ".", 1).replace("tool_choice", "function_call", 1)
    )
