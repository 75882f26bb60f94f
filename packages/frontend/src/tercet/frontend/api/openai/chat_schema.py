"""Request schema of /v1/chat/completions: OpenAI's fields, and the extensions of SGLang, vLLM and others."""

from functools import cache
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, field_validator, model_validator

from tercet.frontend.api.openai.chat_messages import Content, Messages, check_continued, with_reasoning
from tercet.frontend.api.openai.sampling_schema import Count, Metadata, Name, SamplingFields, Strict, refuse
from tercet.frontend.api.openai.structured_schema import StructuredFields
from tercet.frontend.api.openai.tool_schema import ToolFields
from tercet.frontend.errors import BadRequestError
from tercet.frontend.http.json_depth import MAX_JSON_DEPTH, is_within
from tercet.frontend.structured_output.limits import MAX_FREE_TOKENS

Anything = dict[str, Any]
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


class Prediction(Strict):
    """Text that the answer is expected to contain. Generation is faster where the answer equals it."""

    type: Literal["content"]
    content: Content

    @property
    def text(self) -> str:
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)


class Thinking(Strict):
    """DeepSeek's switch for reasoning."""

    type: Literal["enabled", "disabled", "auto"]


class ChatRequest(SamplingFields, StructuredFields, ToolFields):
    """Request for a chat completion."""

    reasoning_field: ClassVar[str] = "reasoning_content"
    """Name of the reasoning field in responses, which is accepted in messages as well."""

    messages: Messages
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    metadata: Metadata | None = None
    store: bool | None = None
    service_tier: Name | None = None
    safety_identifier: Name | None = None
    prompt_cache_key: Name | None = None
    prompt_cache_options: Anything | None = None
    prompt_cache_retention: Name | None = None
    prediction: Prediction | None = None
    verbosity: Literal["low", "medium", "high"] | None = None
    reasoning_effort: Effort | None = None
    thinking: Thinking | None = None
    enable_thinking: bool | None = None
    separate_reasoning: bool | None = None
    stream_reasoning: bool | None = None
    include_reasoning: bool | None = None

    modalities: Annotated[list[Name], Field(max_length=8)] | None = None
    audio: Anything | None = None
    moderation: Anything | None = None
    web_search_options: Anything | None = None

    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: Annotated[dict[Name, Any], Field(max_length=16)] | None = None
    thinking_token_budget: Annotated[int, Field(ge=0, le=MAX_FREE_TOKENS)] | None = None

    @field_validator("messages", mode="before")
    @classmethod
    def _rename_reasoning_field(cls, messages: object) -> object:
        return with_reasoning(messages, cls.reasoning_field)

    @model_validator(mode="after")
    def _refuse_unsupported_fields(self) -> "ChatRequest":
        refuse("modalities", self.modalities, harmless=self.modalities == ["text"])
        refuse("audio", self.audio, harmless=False)
        refuse("moderation", self.moderation, harmless=False)
        refuse("web_search_options", self.web_search_options, harmless=False)
        refuse("separate_reasoning", self.separate_reasoning, harmless=self.separate_reasoning is True)
        refuse("stream_reasoning", self.stream_reasoning, harmless=self.stream_reasoning is True)
        refuse("include_reasoning", self.include_reasoning, harmless=self.include_reasoning is True)
        return self

    @field_validator("chat_template_kwargs")
    @classmethod
    def _check_depth(cls, kwargs: dict[str, Any] | None) -> dict[str, Any] | None:
        if not is_within(kwargs, MAX_JSON_DEPTH):
            raise BadRequestError(
                f"'chat_template_kwargs' is nested deeper than {MAX_JSON_DEPTH} levels.", param="chat_template_kwargs"
            )
        return kwargs

    @model_validator(mode="after")
    def _check_fields(self) -> "ChatRequest":
        if self.top_logprobs is not None and not self.logprobs:
            raise BadRequestError("'top_logprobs' is only allowed when 'logprobs' is true.", param="top_logprobs")
        if self.continue_final_message:
            check_continued(self.messages, add_generation_prompt=self.add_generation_prompt)
        return self

    @model_validator(mode="after")
    def _check_thinking_switches(self) -> "ChatRequest":
        if self.enable_thinking not in (None, self.thinks):
            raise BadRequestError("'thinking' and 'enable_thinking' contradict each other.", param="enable_thinking")
        return self

    @property
    def thinks(self) -> bool | None:
        """Return whether to reason; None leaves it to the model."""
        if self.thinking is None or self.thinking.type == "auto":
            return self.enable_thinking
        return self.thinking.type == "enabled"

    @property
    def output_limit(self) -> tuple[int | None, str]:
        """Return the maximum number of output tokens, and the parameter that set it."""
        if self.max_completion_tokens is not None:
            return self.max_completion_tokens, "max_completion_tokens"
        return self.max_tokens, "max_tokens"


@cache
def chat_request(name: str) -> type[ChatRequest]:
    """Return the schema for a server with this reasoning field."""

    class Named(ChatRequest):
        reasoning_field = name

    return Named
