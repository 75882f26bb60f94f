"""The request of Anthropic's /v1/messages."""

from collections.abc import Sequence, Set
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from tercet.frontend.api.openai.sampling_schema import Name, StopString, Strict, bounded, refuse, refuse_field
from tercet.frontend.errors import BadRequestError, UnsupportedParameterError
from tercet.frontend.media.image_decoder import MAX_URL_LENGTH

Text = Annotated[str, Field(max_length=16_777_216)]
ToolName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,128}$")]
Anything = dict[str, Any]


class TextBlock(Strict):
    """Text block."""

    type: Literal["text"]
    text: Text
    cache_control: Anything | None = None
    citations: Any = None

    @property
    def shown(self) -> str:
        return self.text


class PlainTextSource(Strict):
    """Document that is a text."""

    type: Literal["text"]
    media_type: Literal["text/plain"]
    data: Text

    @property
    def text(self) -> str:
        return self.data


class ContentSource(Strict):
    """Document of text blocks."""

    type: Literal["content"]
    content: Text | Annotated[list[TextBlock], Field(max_length=4096)]

    @property
    def text(self) -> str:
        return text_of(self.content)


class DocumentBlock(Strict):
    """Document whose source is text. The model cites nothing, so `citations` has no effect."""

    type: Literal["document"]
    source: Annotated[PlainTextSource | ContentSource, Field(discriminator="type")]
    title: Name | None = None
    context: Text | None = None
    citations: Anything | None = None
    cache_control: Anything | None = None

    @property
    def shown(self) -> str:
        """Return the document as the model reads it."""
        return "\n".join(filter(None, [self.title, self.context, self.source.text]))


class SearchResultBlock(Strict):
    """Result of a client's search. The model cites nothing, so `citations` has no effect."""

    type: Literal["search_result"]
    source: Text
    title: Name
    content: Annotated[list[TextBlock], Field(max_length=4096)]
    citations: Anything | None = None
    cache_control: Anything | None = None

    @property
    def shown(self) -> str:
        """Return the result as the model reads it."""
        return "\n".join([self.title, self.source, text_of(self.content)])


ReadBlock = TextBlock | DocumentBlock | SearchResultBlock
"""Blocks that are text for the model."""


def text_of(content: str | Sequence[ReadBlock]) -> str:
    """Return the text of a content, with its blocks on lines of their own."""
    return content if isinstance(content, str) else "\n".join(block.shown for block in content)


class Base64Source(Strict):
    """Image as a file in base64."""

    type: Literal["base64"]
    media_type: Literal["image/png", "image/jpeg", "image/gif", "image/webp"]
    data: Annotated[str, Field(max_length=MAX_URL_LENGTH)]

    @property
    def url(self) -> str:
        return f"data:{self.media_type};base64,{self.data}"


class UrlSource(Strict):
    """Image at a URL."""

    type: Literal["url"]
    url: Text


class ImageBlock(Strict):
    """Image of the user or of a tool. All images are resized, so `transformations` cannot refuse large ones."""

    type: Literal["image"]
    source: Annotated[Base64Source | UrlSource, Field(discriminator="type")]
    cache_control: Anything | None = None
    transformations: Anything | None = None

    @model_validator(mode="after")
    def _refuse_other_transformations(self) -> "ImageBlock":
        given = self.transformations
        refuse_field("transformations", given, harmless=given in ({}, {"oversized_image": "downsize"}))
        return self


class ThinkingBlock(Strict):
    """Thinking of an earlier answer. Its signature is not checked."""

    type: Literal["thinking"]
    thinking: Text
    signature: Text | None = None


class RedactedThinkingBlock(Strict):
    """Encrypted thinking of another server's model. It is not shown to the model."""

    type: Literal["redacted_thinking"]
    data: Text


class ToolUseBlock(Strict):
    """Tool call in an earlier answer."""

    type: Literal["tool_use"]
    id: Name
    name: ToolName
    input: Anything
    cache_control: Anything | None = None
    caller: Any = None
    toolset_name: None = None


ResultBlock = Annotated[ReadBlock | ImageBlock, Field(discriminator="type")]


class ToolResultBlock(Strict):
    """Result of a tool call."""

    type: Literal["tool_result"]
    tool_use_id: Name
    content: Text | Annotated[list[ResultBlock], Field(max_length=4096)] | None = None
    is_error: bool | None = None
    cache_control: Anything | None = None
    toolset_name: None = None


Block = Annotated[
    ReadBlock | ImageBlock | ThinkingBlock | RedactedThinkingBlock | ToolUseBlock | ToolResultBlock,
    Field(discriminator="type"),
]


class Message(Strict):
    """Message of a chat."""

    role: Literal["user", "assistant", "system"]
    content: Text | Annotated[list[Block], Field(max_length=4096)]


class Tool(Strict):
    """Tool that the client runs."""

    name: ToolName
    input_schema: Anything
    description: Text | None = None
    type: Literal["custom"] | None = None
    strict: bool | None = None
    cache_control: Anything | None = None
    eager_input_streaming: bool | None = None
    input_examples: Annotated[list[Anything], Field(max_length=256)] | None = None
    allowed_callers: Annotated[list[Name], Field(max_length=8)] | None = None
    defer_loading: bool | None = None

    @model_validator(mode="after")
    def _refuse_unsupported_calling(self) -> "Tool":
        refuse_field("allowed_callers", self.allowed_callers, harmless="direct" in (self.allowed_callers or ()))
        refuse_field("defer_loading", self.defer_loading, harmless=not self.defer_loading)
        return self


class ToolChoice(Strict):
    """Choice of the tool that the model must or may call."""

    type: Literal["auto", "any", "tool", "none"]
    name: ToolName | None = None
    disable_parallel_tool_use: bool | None = None

    @model_validator(mode="after")
    def _check_tool_name(self) -> "ToolChoice":
        if (self.type == "tool") != (self.name is not None):
            raise ValueError("'name' belongs to a choice of type 'tool', and only there")
        return self


class Thinking(Strict):
    """Thinking before the answer: on or off, and the number of tokens for it."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Annotated[int, Field(ge=1024, le=2**31 - 1)] | None = None
    display: Literal["summarized", "omitted"] | None = None

    @model_validator(mode="after")
    def _check_budget(self) -> "Thinking":
        if (self.type == "enabled") != (self.budget_tokens is not None):
            raise ValueError("'budget_tokens' belongs to 'enabled' thinking, and only there")
        return self


class OutputFormat(Strict):
    """JSON schema that the text must match."""

    type: Literal["json_schema"]
    schema_: Anything = Field(alias="schema")


class OutputConfig(Strict):
    """Effort and format of the answer."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormat | None = None


class Metadata(Strict):
    """Metadata of the request."""

    user_id: Name | None = None


_READ = frozenset({"text", "document", "search_result", "image"})
_BLOCKS = _READ | {"thinking", "redacted_thinking", "tool_use", "tool_result"}
_SOURCES = frozenset({"text", "content"})


def _refuse_unread_blocks(content: object, where: str, known: Set[str]) -> None:
    """Raise UnsupportedParameterError that names the first block of an unknown type."""
    for step, block in enumerate(content if isinstance(content, list) else ()):
        kind = block.get("type") if isinstance(block, dict) else None
        if not isinstance(kind, str):
            continue
        if kind not in known:
            raise _unread(f"Content of type '{kind}'", f"{where}.{step}")
        if kind == "tool_result":
            _refuse_unread_blocks(block.get("content"), f"{where}.{step}.content", _READ)
        if kind == "document":
            _refuse_unread_source(block.get("source"), f"{where}.{step}.source")


def _refuse_unread_source(source: object, where: str) -> None:
    """Raise UnsupportedParameterError for a document that is not text."""
    kind = source.get("type") if isinstance(source, dict) else None
    if isinstance(kind, str) and kind not in _SOURCES:
        raise _unread(f"A document with a source of type '{kind}'", where)
    if isinstance(source, dict) and kind == "content":
        _refuse_unread_blocks(source.get("content"), f"{where}.content", {"text"})


def _unread(what: str, where: str) -> UnsupportedParameterError:
    return UnsupportedParameterError(f"{what} is not supported: the model takes text only.", param=where)


def _keeps_whole_context(management: object) -> bool:
    """Return whether the context management keeps the whole context."""
    edits = (management.get("edits") or []) if isinstance(management, dict) else management
    return isinstance(edits, list) and all(
        isinstance(edit, dict)
        and edit.get("type") == "clear_thinking_20251015"
        and edit.get("keep") in ("all", {"type": "all"})
        for edit in edits
    )


class Prompted(Strict):
    """The prompt fields, shared by message creation and token counting."""

    model: Name
    messages: Annotated[list[Message], Field(min_length=1, max_length=100_000)]
    system: Text | Annotated[list[TextBlock], Field(max_length=4096)] | None = None
    tools: Annotated[list[Tool], Field(max_length=1024)] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    cache_control: Anything | None = None
    context_management: Any = None

    @field_validator("messages", mode="before")
    @classmethod
    def _check_block_types(cls, messages: object) -> object:
        for place, message in enumerate(messages if isinstance(messages, list) else ()):
            if isinstance(message, dict):
                _refuse_unread_blocks(message.get("content"), f"messages.{place}.content", _BLOCKS)
        return messages

    @field_validator("system", mode="before")
    @classmethod
    def _check_system_is_text(cls, system: object) -> object:
        _refuse_unread_blocks(system, "system", {"text"})
        return system

    @field_validator("context_management")
    @classmethod
    def _check_context_management(cls, management: object) -> object:
        refuse("context_management", management, harmless=_keeps_whole_context(management))
        return management

    @field_validator("tools", mode="before")
    @classmethod
    def _check_tool_types(cls, tools: object) -> object:
        for place, tool in enumerate(tools if isinstance(tools, list) else ()):
            kind = tool.get("type") if isinstance(tool, dict) else None
            if isinstance(kind, str) and kind != "custom":
                raise UnsupportedParameterError(f"Tools of type '{kind}' are not supported.", param=f"tools.{place}")
        return tools


class CreateMessage(Prompted):
    """Request for a message."""

    max_tokens: Annotated[int, bounded("max_new_tokens", ge=1)]
    stream: bool | None = None
    stop_sequences: Annotated[list[StopString], Field(max_length=16)] | None = None
    temperature: Annotated[float, bounded("temperature", le=1)] | None = None
    top_k: Annotated[int, bounded("top_k", ge=0)] | None = None
    top_p: Annotated[float, bounded("top_p")] | None = None
    metadata: Metadata | None = None
    service_tier: Literal["auto", "standard_only"] | None = None
    inference_geo: Name | None = None
    container: Any = None
    diagnostics: Any = None
    mcp_servers: Any = None

    @model_validator(mode="after")
    def _refuse_unsupported_fields(self) -> "CreateMessage":
        for name in ("container", "diagnostics", "mcp_servers"):
            value = getattr(self, name)
            refuse(name, value, harmless=not value)
        if self.thinking and self.thinking.budget_tokens and self.thinking.budget_tokens >= self.max_tokens:
            raise BadRequestError(
                "'max_tokens' must be greater than 'thinking.budget_tokens'.", param="thinking.budget_tokens"
            )
        return self


class CountTokens(Prompted):
    """Request for the number of tokens of a chat."""
