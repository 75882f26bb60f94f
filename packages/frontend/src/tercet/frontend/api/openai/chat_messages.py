"""Chat messages: all of OpenAI's roles, and reasoning in the fields that SGLang, vLLM and others use."""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from tercet.frontend.api.openai.sampling_schema import Name, Strict, refuse_field
from tercet.frontend.api.openai.text_only import refuse_non_text
from tercet.frontend.errors import BadRequestError, FieldError
from tercet.frontend.media.image_decoder import MAX_URL_LENGTH
from tercet.frontend.media.video.decoder import MAX_URL_LENGTH as MAX_VIDEO_URL

Text = Annotated[str, Field(max_length=16_777_216)]
CallId = Annotated[str, Field(min_length=1, max_length=256)]


class TextPart(Strict):
    """Text part of a message."""

    type: Literal["text"]
    text: Text
    prompt_cache_breakpoint: dict[str, Any] | None = Field(None, exclude=True)


class ImageUrl(Strict):
    """Image in a `data:` URL, or at a URL of an allowed host. Images have one size, so `detail` has no effect."""

    url: Annotated[str, Field(max_length=MAX_URL_LENGTH)]
    detail: Literal["auto", "low", "high", "original"] | None = Field(None, exclude=True)


class ImagePart(Strict):
    """Image in a message of the user or in the result of a tool."""

    type: Literal["image_url"]
    image_url: ImageUrl
    prompt_cache_breakpoint: dict[str, Any] | None = Field(None, exclude=True)


class VideoUrl(Strict):
    """Clip in a `data:` URL, or at a URL of an allowed host. `data:video/jpeg` has frames with commas between them."""

    url: Annotated[str, Field(max_length=MAX_VIDEO_URL)]


class VideoPart(Strict):
    """Clip in a message of the user, as vLLM and SGLang have it."""

    type: Literal["video_url"]
    video_url: VideoUrl
    prompt_cache_breakpoint: dict[str, Any] | None = Field(None, exclude=True)


class InputAudio(Strict):
    """Sound in base64. The file itself says what it is."""

    data: Annotated[str, Field(max_length=MAX_URL_LENGTH)]
    format: Literal["wav", "mp3"]


class AudioPart(Strict):
    """Sound in a message of the user."""

    type: Literal["input_audio"]
    input_audio: InputAudio
    prompt_cache_breakpoint: dict[str, Any] | None = Field(None, exclude=True)


class RefusalPart(Strict):
    """Refusal in an earlier answer."""

    type: Literal["refusal"]
    refusal: Text


Content = Text | Annotated[list[TextPart], Field(min_length=1, max_length=4096)]
SeenPart = Annotated[TextPart | ImagePart, Field(discriminator="type")]
UserPart = Annotated[TextPart | ImagePart | VideoPart | AudioPart, Field(discriminator="type")]
UserContent = Text | Annotated[list[UserPart], Field(min_length=1, max_length=4096)]
Result = Text | Annotated[list[SeenPart], Field(max_length=4096)]
"""Result of a tool, which may have no parts."""
SaidPart = Annotated[TextPart | RefusalPart, Field(discriminator="type")]
ParsedMessage = Text | Annotated[list[SaidPart], Field(max_length=4096)]


class ChatMessage(Strict):
    """Fields of all messages. A `type` of `text` or `message`, which some clients add, is ignored."""

    @model_validator(mode="before")
    @classmethod
    def _drop_type(cls, message: object) -> object:
        if isinstance(message, dict) and message.get("type", "") in ("text", "message", None):
            return {name: value for name, value in message.items() if name != "type"}
        return message


class InstructionMessage(ChatMessage):
    """Instructions of the developer. Both roles mean the same."""

    role: Literal["system", "developer"]
    content: Content
    name: Name | None = None


class UserMessage(ChatMessage):
    """Message of the user."""

    role: Literal["user"]
    content: UserContent
    name: Name | None = None


class CalledFunction(Strict):
    """Called function, with its arguments as JSON."""

    name: Name
    arguments: Text
    parsed_arguments: Any = Field(None, exclude=True)


class CalledCustom(Strict):
    """Called custom tool, with its input."""

    name: Name
    input: Text


class FunctionCall(Strict):
    """Function call in an earlier answer. Fields that OpenAI's clients add to parsed answers are ignored."""

    id: CallId
    type: Literal["function"]
    function: CalledFunction
    index: Any = Field(None, exclude=True)


class CustomCall(Strict):
    """Custom tool call in an earlier answer."""

    id: CallId
    type: Literal["custom"]
    custom: CalledCustom
    index: Any = Field(None, exclude=True)
    function: None = Field(None, exclude=True)


ToolCall = Annotated[FunctionCall | CustomCall, Field(discriminator="type")]


class AssistantMessage(ChatMessage):
    """Earlier answer, or the beginning of the next one. Fields that clients add to answers are ignored."""

    role: Literal["assistant"]
    content: ParsedMessage | None = None
    name: Name | None = None
    refusal: Text | None = None
    reasoning_content: Text | None = None
    reasoning: Text | None = None
    audio: dict[str, Any] | None = None
    function_call: CalledFunction | None = None
    tool_calls: Annotated[list[ToolCall], Field(max_length=128)] | None = None
    annotations: Annotated[list[dict[str, Any]], Field(max_length=128)] | None = None
    parsed: Any = Field(None, exclude=True)
    provider_specific_fields: Any = Field(None, exclude=True)

    @model_validator(mode="after")
    def _check_content(self) -> "AssistantMessage":
        refuse_field("audio", self.audio, harmless=False)
        contents = (self.content, self.refusal, self.reasoning_content, self.reasoning)
        if not self.tool_calls and self.function_call is None and all(each in (None, []) for each in contents):
            raise FieldError("An assistant message needs 'content' or 'tool_calls'.", "content")
        return self


class ToolMessage(ChatMessage):
    """Result of a tool call."""

    role: Literal["tool"]
    content: Result
    tool_call_id: CallId
    name: Name | None = None


class FunctionMessage(ChatMessage):
    """Result of a function call, in the form that OpenAI used before tools."""

    role: Literal["function"]
    content: Text | None
    name: Name


Message = Annotated[
    InstructionMessage | UserMessage | AssistantMessage | ToolMessage | FunctionMessage, Field(discriminator="role")
]


_MEDIA = {"user": ("image_url", "video_url", "input_audio"), "tool": ("image_url",)}
"""Types of parts besides text, by role."""


def _check_text_only(messages: object) -> object:
    for place, message in enumerate(messages if isinstance(messages, list) else ()):
        if isinstance(message, dict):
            taken = _MEDIA.get(str(message.get("role")), ())
            refuse_non_text(message.get("content"), f"messages[{place}].content", images=taken)
    return messages


Messages = Annotated[list[Message], Field(min_length=1, max_length=8192), BeforeValidator(_check_text_only)]


def check_continued(messages: list[Message] | None, *, add_generation_prompt: bool | None) -> None:
    """Raise BadRequestError if the final message cannot be continued."""
    param = "continue_final_message"
    if add_generation_prompt:
        raise BadRequestError("'continue_final_message' and 'add_generation_prompt' exclude each other.", param=param)
    if not messages or messages[-1].role != "assistant":
        raise BadRequestError("The message to continue must be the assistant's.", param=param)


def with_reasoning(messages: object, name: str) -> object:
    """Return the messages with the reasoning field `name` renamed to the standard one. Other values are unchanged."""
    if not isinstance(messages, list) or name in AssistantMessage.model_fields:
        return messages
    return [_renamed(each, name) for each in messages]


def _renamed(message: object, name: str) -> object:
    if not isinstance(message, dict) or message.get("role") != "assistant" or name not in message:
        return message
    if message.get("reasoning_content") is not None:
        return message  # given under both names: left for the schema to refuse
    return {**{key: value for key, value in message.items() if key != name}, "reasoning_content": message[name]}


def message_of(message: Message) -> dict[str, Any]:
    """Return a message as `tercet.frontend.chat.messages` expects it. A list of no parts is no content."""
    shaped = message.model_dump(exclude_none=True, exclude={"annotations"})
    if shaped.get("content") == []:
        del shaped["content"]
    return shaped if message.role == "assistant" else {"content": "", **shaped}
