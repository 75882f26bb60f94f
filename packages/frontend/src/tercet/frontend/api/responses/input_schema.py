"""Request schemas of input items, which include the output items of earlier responses."""

from typing import Annotated, Any, Literal

from pydantic import AliasChoices, Discriminator, Field, Tag, model_validator

from tercet.frontend.api.openai.sampling_schema import Name, Strict, refuse_field
from tercet.frontend.api.openai.text_only import refuse_non_text
from tercet.frontend.errors import FieldError, UnsupportedParameterError
from tercet.frontend.media.image_decoder import MAX_URL_LENGTH

Text = Annotated[str, Field(max_length=16_777_216)]
ImageUrl = Annotated[str, Field(max_length=MAX_URL_LENGTH)]
Status = Literal["in_progress", "completed", "incomplete"]
ASYNC = AliasChoices("async", "async_")
"""Python keyword; OpenAI's clients write it with an underscore when they dump an item under Python names."""


class TextPart(Strict):
    """Text of the user or the model. `parsed`, which OpenAI's clients add, is ignored."""

    type: Literal["input_text", "output_text", "text"]
    text: Text
    parsed: Any = Field(None, exclude=True)
    annotations: Annotated[list[Any], Field(max_length=4096)] | None = None
    logprobs: Annotated[list[Any], Field(max_length=131_072)] | None = None
    prompt_cache_breakpoint: Any = None


class RefusalPart(Strict):
    """Refusal in an earlier message."""

    type: Literal["refusal"]
    refusal: Text


class _ImageSource(Strict):
    """Common fields of images. Images have one size, so `detail` has no effect."""

    file_id: Name | None = None
    detail: Literal["auto", "low", "high", "original"] | None = None
    prompt_cache_breakpoint: Any = Field(None, exclude=True)

    @model_validator(mode="after")
    def _refuse_uploaded_file(self) -> "_ImageSource":
        refuse_field("file_id", self.file_id, harmless=False)
        return self


class ImagePart(_ImageSource):
    """Image in a `data:` URL, or at a URL of an allowed host."""

    type: Literal["input_image"]
    image_url: ImageUrl | None = None

    @model_validator(mode="after")
    def _check_url(self) -> "ImagePart":
        if self.image_url is None:
            raise FieldError("An image needs an 'image_url'.")
        return self


class FilePart(_ImageSource):
    """File that is an image, in a `data:` URL."""

    type: Literal["input_file"]
    file_data: ImageUrl | None = None
    file_url: ImageUrl | None = None
    filename: Name | None = None

    @model_validator(mode="after")
    def _check_data(self) -> "FilePart":
        refuse_field("file_url", self.file_url, harmless=False)
        if self.file_data is None:
            raise FieldError("A file needs 'file_data'.")
        if not self.file_data.startswith("data:image/"):
            message = "Files are supported if they are images: 'file_data' must begin with 'data:image/'."
            raise FieldError(message, "file_data", error=UnsupportedParameterError)
        return self


class ReasoningPart(Strict):
    """Text of reasoning."""

    type: Literal["reasoning_text", "summary_text"]
    text: Text


SeenPart = Annotated[TextPart | ImagePart | FilePart, Field(discriminator="type")]
Part = Annotated[TextPart | RefusalPart | ImagePart | FilePart, Field(discriminator="type")]
IMAGES = frozenset({"input_image", "input_file"})


class MessageItem(Strict):
    """Message of a chat."""

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: Text | Annotated[list[Part], Field(max_length=4096)]
    id: Name | None = None
    status: Status | None = None
    phase: Literal["commentary", "final_answer"] | None = None


class ReasoningItem(Strict):
    """Reasoning of an earlier answer."""

    type: Literal["reasoning"]
    id: Name | None = None
    summary: Annotated[list[ReasoningPart], Field(max_length=4096)] | None = None
    content: Annotated[list[ReasoningPart], Field(max_length=4096)] | None = None
    encrypted_content: Text | None = None
    status: Status | None = None


class CallItem(Strict):
    """Common fields of tool calls."""

    call_id: Name
    name: Name
    id: Name | None = None
    status: Status | None = None
    namespace: Name | None = None
    caller: Any = None
    async_: bool | None = Field(None, alias="async", validation_alias=ASYNC, exclude=True)
    created_by: Name | None = Field(None, exclude=True)


class FunctionCallItem(CallItem):
    """Function call. `parsed_arguments`, which OpenAI's clients add, is ignored."""

    type: Literal["function_call"]
    arguments: Text
    parsed_arguments: Any = Field(None, exclude=True)


class CustomCallItem(CallItem):
    """Custom tool call."""

    type: Literal["custom_tool_call"]
    input: Text


class OutputItem(Strict):
    """Result of a tool call."""

    type: Literal["function_call_output", "custom_tool_call_output"]
    call_id: Name
    output: Text | Annotated[list[SeenPart], Field(max_length=4096)]
    id: Name | None = None
    status: Status | None = None
    name: Name | None = None
    namespace: Name | None = None
    caller: Any = None
    created_by: Name | None = Field(None, exclude=True)


class ItemReference(Strict):
    """Reference to an item of a stored response."""

    type: Literal["item_reference"] = "item_reference"
    id: Name


def _kind(item: object) -> str:
    """Return the type of an item. An item without one is a reference if it has only an id, otherwise a message."""
    if not isinstance(item, dict):  # a model, when it is serialized
        return str(getattr(item, "type", "message"))
    kind = item.get("type")
    if isinstance(kind, str):
        return kind
    return "item_reference" if item.keys() == {"id"} else "message"


InputItem = Annotated[
    Annotated[MessageItem, Tag("message")]
    | Annotated[ReasoningItem, Tag("reasoning")]
    | Annotated[FunctionCallItem, Tag("function_call")]
    | Annotated[OutputItem, Tag("function_call_output")]
    | Annotated[CustomCallItem, Tag("custom_tool_call")]
    | Annotated[OutputItem, Tag("custom_tool_call_output")]
    | Annotated[ItemReference, Tag("item_reference")],
    Discriminator(_kind),
]

_ITEMS = {
    *("message", "reasoning", "item_reference"),
    *("function_call", "function_call_output", "custom_tool_call", "custom_tool_call_output"),
}


def known_types(param: str, items: object) -> object:
    """Return the items unchanged. Raises UnsupportedParameterError that names the first item of an unsupported type."""
    for place, item in enumerate(items if isinstance(items, list) else ()):
        if not isinstance(item, dict):
            continue
        kind = item.get("type")
        if isinstance(kind, str) and kind not in _ITEMS:
            raise UnsupportedParameterError(f"Items of type '{kind}' are not supported.", param=f"{param}[{place}]")
        images = IMAGES if item.get("role") == "user" else ()
        refuse_non_text(item.get("content"), f"{param}[{place}].content", images=images)
        refuse_non_text(item.get("output"), f"{param}[{place}].output", images=IMAGES)
    return items
