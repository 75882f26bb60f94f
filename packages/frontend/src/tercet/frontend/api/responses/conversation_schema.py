"""Request schemas of /v1/conversations. Items are those of /v1/responses."""

from typing import Annotated

from pydantic import Field, field_validator

from tercet.frontend.api.openai.sampling_schema import Metadata, Strict
from tercet.frontend.api.responses.input_schema import InputItem, known_types

_MAX_ITEMS = 20


class CreateConversation(Strict):
    """Request for a new conversation."""

    items: Annotated[list[InputItem], Field(max_length=_MAX_ITEMS)] | None = None
    metadata: Metadata | None = None

    @field_validator("items", mode="before")
    @classmethod
    def _check_item_types(cls, value: object) -> object:
        return known_types("items", value)


class UpdateConversation(Strict):
    """New metadata of a conversation."""

    metadata: Metadata | None


class AddItems(Strict):
    """Items to add to the end of a conversation."""

    items: Annotated[list[InputItem], Field(min_length=1, max_length=_MAX_ITEMS)]

    @field_validator("items", mode="before")
    @classmethod
    def _check_item_types(cls, value: object) -> object:
        return known_types("items", value)
