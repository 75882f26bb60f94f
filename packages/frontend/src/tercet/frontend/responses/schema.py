"""The request of /v1/responses: every field OpenAI documents, and the extensions it shares with chat."""

from collections.abc import Iterator, Set
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from tercet.frontend.errors import BadRequestError, UnsupportedParameterError
from tercet.frontend.openai.sampling_schema import Count, Name, Stops, Strict, refuse
from tercet.frontend.responses.input_schema import ASYNC, InputItem, Text, known_types
from tercet.frontend.responses.namespaces import known_as

Anything = dict[str, Any]
ToolName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,128}$")]

_INCLUDABLE = {
    "message.output_text.logprobs": True,
    "reasoning.encrypted_content": True,  # reasoning is told openly, and comes back the same way
    "web_search_call.action.sources": False,
    "web_search_call.results": False,
    "code_interpreter_call.outputs": False,
    "computer_call_output.output.image_url": False,
    "file_search_call.results": False,
    "message.input_image.image_url": False,
}
"""What a client may ask to have included, and whether this server ever has it."""


class FunctionTool(Strict):
    """A function that the model may call."""

    type: Literal["function"]
    name: ToolName
    description: Text | None = None
    parameters: Anything | None = None
    strict: bool | None = None
    output_schema: Anything | None = Field(None, exclude=True)
    allowed_callers: Annotated[list[Literal["direct", "programmatic"]], Field(max_length=8)] | None = Field(
        None, exclude=True
    )
    defer_loading: bool | None = Field(None, exclude=True)
    async_: bool | None = Field(None, alias="async", validation_alias=ASYNC, exclude=True)

    @model_validator(mode="after")
    def _can_be_called_at_once(self) -> "FunctionTool":
        """A schema of outputs is read by programs that call, and there are none here: only the model calls."""
        refuse("tools.allowed_callers", self.allowed_callers, harmless="direct" in (self.allowed_callers or ()))
        refuse("tools.defer_loading", self.defer_loading, harmless=not self.defer_loading)
        refuse("tools.async", self.async_, harmless=not self.async_)
        return self


class Namespace(Strict):
    """Functions that belong together."""

    type: Literal["namespace"]
    name: ToolName
    description: Text | None = None
    tools: Annotated[list[FunctionTool], Field(min_length=1, max_length=1024)]


class OfflineSearch(Strict):
    """A search of what OpenAI keeps of the web, and of nothing else: here it could find nothing, and is left out."""

    type: Literal["web_search"]
    external_web_access: Literal[False]
    filters: Any = None
    search_context_size: Any = None
    user_location: Any = None


AnyTool = Annotated[FunctionTool | Namespace | OfflineSearch, Field(discriminator="type")]


class NamedFunction(Strict):
    """The function that is to be called."""

    type: Literal["function"]
    name: ToolName


class AllowedTools(Strict):
    """Some of the tools."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedFunction], Field(min_length=1, max_length=1024)]


class TextFormat(Strict):
    """Any text."""

    type: Literal["text"]


class JsonObjectFormat(Strict):
    """Any JSON object."""

    type: Literal["json_object"]


class JsonSchemaFormat(Strict):
    """An instance of a schema."""

    type: Literal["json_schema"]
    name: ToolName
    schema_: Anything = Field(alias="schema")
    description: Text | None = None
    strict: bool | None = None


class TextConfig(Strict):
    """What the text is to look like."""

    format: Annotated[TextFormat | JsonObjectFormat | JsonSchemaFormat, Field(discriminator="type")] | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class Reasoning(Strict):
    """How much to think. There are no summaries: reasoning is told as it is."""

    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None
    generate_summary: Literal["auto", "concise", "detailed"] | None = None
    context: Literal["auto", "current_turn", "all_turns"] | None = None
    mode: Name | None = None

    @model_validator(mode="after")
    def _is_the_templates_to_show(self) -> "Reasoning":
        """Which of the reasoning of earlier turns a model reads again, its chat template decides."""
        refuse("reasoning.context", self.context, harmless=self.context == "auto")
        refuse("reasoning.mode", self.mode, harmless=self.mode == "standard")
        return self


class StreamOptions(Strict):
    """What a stream carries besides events."""

    include_obfuscation: bool | None = None


def _searches_offline(tool: object) -> bool:
    return isinstance(tool, dict) and tool.get("type") == "web_search" and tool.get("external_web_access") is False


def _refuse_no_function(tool: object, where: str, known: Set[str]) -> None:
    kind = tool.get("type") if isinstance(tool, dict) else None
    if isinstance(kind, str) and kind not in known:
        raise UnsupportedParameterError(f"Tools of type '{kind}' are not supported.", param=where)


class Prompted(Strict):
    """What stands before an answer: the part that creating a response and counting its tokens share."""

    model: Name
    input: Text | Annotated[list[InputItem], Field(max_length=16_384)] | None = None
    instructions: Text | None = None
    previous_response_id: Name | None = None
    conversation: Any = None
    tools: Annotated[list[AnyTool], Field(max_length=1024)] | None = None
    tool_choice: (
        Literal["none", "auto", "required"]
        | Annotated[NamedFunction | AllowedTools, Field(discriminator="type")]
        | None
    ) = None
    parallel_tool_calls: bool | None = None
    reasoning: Reasoning | None = None
    text: TextConfig | None = None
    truncation: Literal["auto", "disabled"] | None = None

    @field_validator("input", mode="before")
    @classmethod
    def _items_are_known(cls, value: object) -> object:
        return known_types("input", value)

    @field_validator("tools", mode="before")
    @classmethod
    def _tools_are_functions(cls, value: object) -> object:
        if not isinstance(value, list):
            return value
        for place, tool in enumerate(value):
            if _searches_offline(tool):
                continue
            _refuse_no_function(tool, f"tools[{place}]", {"function", "namespace"})
            if isinstance(tool, dict) and isinstance(inner := tool.get("tools"), list):
                for step, each in enumerate(inner):
                    _refuse_no_function(each, f"tools[{place}].tools[{step}]", {"function"})
        return value

    @field_validator("tools")
    @classmethod
    def _nothing_is_searched(cls, value: list[AnyTool] | None) -> list[AnyTool] | None:
        return None if value is None else [tool for tool in value if not isinstance(tool, OfflineSearch)]

    @field_validator("tool_choice", mode="before")
    @classmethod
    def _choice_is_among_functions(cls, value: object) -> object:
        kind = value.get("type") if isinstance(value, dict) else None
        if isinstance(kind, str) and kind not in {"function", "allowed_tools"}:
            raise UnsupportedParameterError(f"A choice of type '{kind}' is not supported.", param="tool_choice")
        return value

    @model_validator(mode="after")
    def _prompt_is_ours_to_find(self) -> "Prompted":
        refuse("conversation", self.conversation, harmless=False)
        if self.truncation == "auto":
            raise UnsupportedParameterError("'truncation' can only be 'disabled'.", param="truncation")
        if not self.input and self.previous_response_id is None:
            raise BadRequestError(
                "Missing required parameter: 'input'.", param="input", code="missing_required_parameter"
            )
        return self

    def functions(self) -> Iterator[tuple[str, str, FunctionTool]]:
        """Each function: what the model calls it, what it is told of it, and the function itself.

        The description of a namespace stands once, before that of its first function.
        """
        for tool in self.tools or ():
            if isinstance(tool, FunctionTool):
                yield tool.name, tool.description or "", tool
            elif isinstance(tool, Namespace):
                about = tool.description
                for each in tool.tools:
                    told = "\n\n".join(text for text in (about, each.description) if text)
                    yield known_as(tool.name, each.name), told, each
                    about = None

    @property
    def calls_several(self) -> bool:
        """Whether one answer may have more calls than one; a function that is named is called exactly once."""
        return self.parallel_tool_calls is not False and not isinstance(self.tool_choice, NamedFunction)


class TokenCount(Prompted):
    """How many tokens an input has."""

    personality: Name | None = None


class CreateResponse(Prompted):
    """A response to make."""

    background: bool | None = None
    client_metadata: Anything | None = Field(None, exclude=True)
    include: Annotated[list[Name], Field(max_length=32)] | None = None
    max_output_tokens: Annotated[int, Field(ge=1, le=2**31 - 1)] | None = None
    max_tool_calls: Count | None = None
    metadata: Annotated[dict[Annotated[str, Field(max_length=64)], Name], Field(max_length=16)] | None = None
    prompt_cache_key: Name | None = None
    prompt_cache_options: Anything | None = None
    prompt_cache_retention: Literal["in_memory", "24h"] | None = None
    safety_identifier: Name | None = None
    service_tier: Literal["auto", "default", "flex", "scale", "priority", "fast", "ultrafast"] | None = None
    store: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    user: Name | None = None

    access_programs: Any = None
    context_management: Any = None
    image: Any = None
    moderation: Any = None
    prompt: Any = None

    seed: Annotated[int, Field(ge=-(2**63), le=2**63 - 1)] | None = None
    stop: Stops | None = None
    top_k: Annotated[int, Field(ge=-1, le=2**31 - 1)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    min_tokens: Count | None = None
    ignore_eos: bool | None = None
    priority: Annotated[int, Field(ge=-(2**31), le=2**31 - 1)] | None = None
    cache_salt: Annotated[str, Field(max_length=256)] | None = None

    @field_validator("include")
    @classmethod
    def _has_what_is_included(cls, include: list[str] | None) -> list[str] | None:
        for place, each in enumerate(include or ()):
            if each not in _INCLUDABLE:
                raise ValueError(f"nothing is called '{each}'")
            if not _INCLUDABLE[each]:
                raise UnsupportedParameterError(f"'{each}' is not supported by this server.", param=f"include[{place}]")
        return include

    @model_validator(mode="after")
    def _only_what_is_honoured(self) -> "CreateResponse":
        for name in ("access_programs", "context_management", "image", "moderation", "prompt"):
            refuse(name, getattr(self, name), harmless=False)
        return self

    @model_validator(mode="after")
    def _fields_agree(self) -> "CreateResponse":
        if self.stream_options is not None and not self.stream:
            raise BadRequestError("'stream_options' is only allowed when 'stream' is true.", param="stream_options")
        if self.background and self.store is False:
            raise BadRequestError("A response in the background has to be stored.", param="background")
        return self

    @property
    def wants_logprobs(self) -> bool:
        """Whether text comes with log-probabilities."""
        return "message.output_text.logprobs" in (self.include or ())
