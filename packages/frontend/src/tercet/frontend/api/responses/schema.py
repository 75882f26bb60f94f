"""Request schema of /v1/responses: OpenAI's fields, and the extensions shared with chat."""

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from tercet.frontend.api.openai.sampling_schema import (
    Count,
    FilterFields,
    Metadata,
    Name,
    Stops,
    Strict,
    bounded,
    refuse,
    refuse_field,
)
from tercet.frontend.api.responses.input_schema import InputItem, Text, known_types
from tercet.frontend.api.responses.tool_schema import (
    Anything,
    Choice,
    NamedTool,
    TextFormat,
    ToolName,
    Tools,
    supported_choice,
    supported_tools,
)
from tercet.frontend.errors import BadRequestError, UnsupportedParameterError

_INCLUDABLE = {
    "message.output_text.logprobs": True,
    "reasoning.encrypted_content": True,  # reasoning is sent in plain text, and accepted back in plain text
    "web_search_call.action.sources": False,
    "web_search_call.results": False,
    "code_interpreter_call.outputs": False,
    "computer_call_output.output.image_url": False,
    "file_search_call.results": False,
    "message.input_image.image_url": True,  # input items always have it
}
"""Values of `include`, and whether this server supports each."""


class JsonObjectFormat(Strict):
    """JSON object."""

    type: Literal["json_object"]


class JsonSchemaFormat(Strict):
    """Instance of a JSON schema."""

    type: Literal["json_schema"]
    name: ToolName
    schema_: Anything = Field(alias="schema")
    description: Text | None = None
    strict: bool | None = None


class TextConfig(Strict):
    """Format of the text."""

    format: Annotated[TextFormat | JsonObjectFormat | JsonSchemaFormat, Field(discriminator="type")] | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class Reasoning(Strict):
    """Effort of reasoning. Reasoning is shown in full, so there are no summaries."""

    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None
    generate_summary: Literal["auto", "concise", "detailed"] | None = None
    context: Literal["auto", "current_turn", "all_turns"] | None = None
    mode: Name | None = None

    @model_validator(mode="after")
    def _refuse_unsupported_reasoning(self) -> "Reasoning":
        """Refuse to choose which earlier reasoning the model sees, because its chat template decides that."""
        refuse_field("context", self.context, harmless=self.context == "auto")
        refuse_field("mode", self.mode, harmless=self.mode == "standard")
        return self


class StreamOptions(Strict):
    """Options of a stream."""

    include_obfuscation: bool | None = None


def missing_input_error() -> BadRequestError:
    """Return the error for a request without input."""
    return BadRequestError("Missing required parameter: 'input'.", param="input", code="missing_required_parameter")


class InConversation(Strict):
    """Conversation that the response continues."""

    id: Name


class Prompted(Strict):
    """The prompt fields, shared by response creation and token counting."""

    model: Name
    input: Text | Annotated[list[InputItem], Field(max_length=8192)] | None = None
    instructions: Text | None = None
    previous_response_id: Name | None = None
    conversation: Name | InConversation | None = None
    tools: Tools | None = None
    tool_choice: Choice | None = None
    parallel_tool_calls: bool | None = None
    reasoning: Reasoning | None = None
    text: TextConfig | None = None
    truncation: Literal["auto", "disabled"] | None = None

    @field_validator("input", mode="before")
    @classmethod
    def _check_item_types(cls, value: object) -> object:
        return known_types("input", value)

    @field_validator("tools", mode="before")
    @classmethod
    def _check_tool_types(cls, value: object) -> object:
        return supported_tools(value)

    @field_validator("tool_choice", mode="before")
    @classmethod
    def _check_choice_type(cls, value: object) -> object:
        return supported_choice(value)

    @model_validator(mode="after")
    def _check_prompt_source(self) -> "Prompted":
        if self.conversation is not None and self.previous_response_id is not None:
            raise BadRequestError(
                "Only one of 'conversation' and 'previous_response_id' can be given.",
                param="conversation",
                code="mutually_exclusive_parameters",
            )
        if self.truncation == "auto":
            raise UnsupportedParameterError("'truncation' can only be 'disabled'.", param="truncation")
        if not self.input and self.previous_response_id is None and self.conversation is None:
            raise missing_input_error()
        return self

    @property
    def conversation_id(self) -> str | None:
        """Return the id of the conversation, in either form."""
        return self.conversation.id if isinstance(self.conversation, InConversation) else self.conversation

    @property
    def allows_parallel_calls(self) -> bool:
        """Return whether the response may have several calls. A named tool is called exactly once."""
        return self.parallel_tool_calls is not False and not isinstance(self.tool_choice, NamedTool)


class TokenCount(Prompted):
    """Request for the number of tokens of an input."""

    personality: Name | None = None


class _OpenAIFields(Prompted):
    """OpenAI's fields of a response to make, with some of its chats."""

    background: bool | None = None
    client_metadata: Anything | None = Field(None, exclude=True)
    include: Annotated[list[Name], Field(max_length=32)] | None = None
    max_output_tokens: Annotated[int, bounded("max_new_tokens", ge=1)] | None = None
    max_tool_calls: Count | None = None
    metadata: Metadata | None = None
    prompt_cache_key: Name | None = None
    prompt_cache_options: Anything | None = None
    prompt_cache_retention: Literal["in_memory", "24h"] | None = None
    safety_identifier: Name | None = None
    service_tier: Literal["auto", "default", "flex", "scale", "priority", "fast", "ultrafast"] | None = None
    store: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: Annotated[float, bounded("temperature")] | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    top_p: Annotated[float, bounded("top_p")] | None = None
    user: Name | None = None

    access_programs: Any = None
    context_management: Any = None
    image: Any = None
    moderation: Any = None
    prompt: Any = None

    frequency_penalty: Annotated[float, bounded("frequency_penalty")] | None = None
    presence_penalty: Annotated[float, bounded("presence_penalty")] | None = None
    seed: Annotated[int, bounded("seed")] | None = None
    stop: Stops | None = None


class CreateResponse(FilterFields, _OpenAIFields):
    """Request for a response."""

    repetition_penalty: Annotated[float, bounded("repetition_penalty")] | None = None
    min_tokens: Count | None = None
    ignore_eos: bool | None = None
    priority: Annotated[int, Field(ge=-(2**31), le=2**31 - 1)] | None = None
    cache_salt: Annotated[str, Field(max_length=256)] | None = None

    @field_validator("include")
    @classmethod
    def _check_include(cls, include: list[str] | None) -> list[str] | None:
        for place, each in enumerate(include or ()):
            if each not in _INCLUDABLE:
                raise ValueError(f"nothing is called '{each}'")
            if not _INCLUDABLE[each]:
                raise UnsupportedParameterError(f"'{each}' is not supported by this server.", param=f"include[{place}]")
        return include

    @model_validator(mode="after")
    def _refuse_unsupported_fields(self) -> "CreateResponse":
        for name in ("access_programs", "context_management", "image", "moderation", "prompt"):
            refuse(name, getattr(self, name), harmless=False)
        return self

    @model_validator(mode="after")
    def _check_fields(self) -> "CreateResponse":
        if self.stream_options is not None and not self.stream:
            raise BadRequestError("'stream_options' is only allowed when 'stream' is true.", param="stream_options")
        if self.background and self.store is False:
            raise BadRequestError("A response in the background has to be stored.", param="background")
        return self

    @property
    def wants_logprobs(self) -> bool:
        """Return whether text comes with log-probabilities."""
        return "message.output_text.logprobs" in (self.include or ())
