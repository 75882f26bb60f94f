"""The request of /v1/chat/completions: every field OpenAI documents, and this field's extensions."""

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from tercet.frontend.errors import BadRequestError
from tercet.frontend.openai.sampling_schema import Count, Name, SamplingFields, Strict, refuse

Text = Annotated[str, Field(max_length=16_777_216)]
Anything = dict[str, Any]


class TextPart(Strict):
    """A piece of a message's text."""

    type: Literal["text"]
    text: Text


Content = Text | Annotated[list[TextPart], Field(min_length=1, max_length=4096)]


class InstructionMessage(Strict):
    """What the developer tells the model; the two roles mean the same."""

    role: Literal["system", "developer"]
    content: Content
    name: Name | None = None


class UserMessage(Strict):
    """What the user says."""

    role: Literal["user"]
    content: Content
    name: Name | None = None


class AssistantMessage(Strict):
    """What the model said before, or is to go on with."""

    role: Literal["assistant"]
    content: Content | None = None
    name: Name | None = None
    refusal: Text | None = None
    reasoning_content: Text | None = None
    audio: Anything | None = None
    function_call: Anything | None = None
    tool_calls: list[Anything] | None = None
    annotations: list[Anything] | None = None

    @model_validator(mode="after")
    def _says_something_we_can_pass_on(self) -> "AssistantMessage":
        refuse("messages.tool_calls", self.tool_calls, harmless=not self.tool_calls)
        refuse("messages.function_call", self.function_call, harmless=False)
        refuse("messages.audio", self.audio, harmless=False)
        if self.content is None and self.refusal is None:
            raise BadRequestError("An assistant message needs 'content'.", param="messages")
        return self


Message = Annotated[InstructionMessage | UserMessage | AssistantMessage, Field(discriminator="role")]


class ChatRequest(SamplingFields):
    """A chat to go on with."""

    messages: Annotated[list[Message], Field(min_length=1, max_length=16_384)]
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    metadata: Annotated[dict[Name, Name], Field(max_length=16)] | None = None
    store: bool | None = None
    service_tier: Name | None = None
    safety_identifier: Name | None = None
    prompt_cache_key: Name | None = None
    prompt_cache_options: Anything | None = None
    prompt_cache_retention: Name | None = None
    prediction: Anything | None = None
    verbosity: Literal["low", "medium", "high"] | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None

    modalities: list[str] | None = None
    response_format: Anything | None = None
    parallel_tool_calls: bool | None = None
    tools: list[Anything] | None = None
    tool_choice: str | Anything | None = None
    functions: list[Anything] | None = None
    function_call: str | Anything | None = None
    audio: Anything | None = None
    moderation: Anything | None = None
    web_search_options: Anything | None = None

    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: Anything | None = None

    @model_validator(mode="after")
    def _only_what_is_honoured(self) -> "ChatRequest":
        refuse("tools", self.tools, harmless=not self.tools)
        refuse("tool_choice", self.tool_choice, harmless=self.tool_choice in ("none", "auto"))
        refuse("functions", self.functions, harmless=not self.functions)
        refuse("function_call", self.function_call, harmless=self.function_call in ("none", "auto"))
        refuse("response_format", self.response_format, harmless=self.response_format == {"type": "text"})
        refuse("modalities", self.modalities, harmless=self.modalities == ["text"])
        refuse("audio", self.audio, harmless=False)
        refuse("moderation", self.moderation, harmless=False)
        refuse("web_search_options", self.web_search_options, harmless=False)
        return self

    @model_validator(mode="after")
    def _fields_agree(self) -> "ChatRequest":
        if self.top_logprobs is not None and not self.logprobs:
            raise BadRequestError("'top_logprobs' is only allowed when 'logprobs' is true.", param="top_logprobs")
        if self.continue_final_message:
            if self.add_generation_prompt:
                raise BadRequestError(
                    "'continue_final_message' and 'add_generation_prompt' exclude each other.",
                    param="continue_final_message",
                )
            if self.messages[-1].role != "assistant":
                raise BadRequestError(
                    "The message to continue must be the assistant's.", param="continue_final_message"
                )
        return self

    @property
    def output_limit(self) -> tuple[int | None, str]:
        """Tokens to generate at the most, and the parameter that said so."""
        if self.max_completion_tokens is not None:
            return self.max_completion_tokens, "max_completion_tokens"
        return self.max_tokens, "max_tokens"
