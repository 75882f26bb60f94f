"""Every nested field that the installed clients document is known to the schemas.

The types of a client and the schemas are walked side by side from the request down, and paired by role and type.
"""

from collections.abc import Iterator
from types import UnionType
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

import pytest
from anthropic.types.message_create_params import MessageCreateParamsNonStreaming
from openai.types.chat.completion_create_params import CompletionCreateParamsNonStreaming
from openai.types.completion_create_params import CompletionCreateParamsNonStreaming as TextParams
from openai.types.conversations.conversation_create_params import ConversationCreateParams
from openai.types.conversations.conversation_update_params import ConversationUpdateParams
from openai.types.responses.input_token_count_params import InputTokenCountParams
from openai.types.responses.response_create_params import ResponseCreateParamsNonStreaming
from pydantic import BaseModel
from typing_extensions import is_typeddict

from tercet.frontend.api.anthropic.schema import CreateMessage
from tercet.frontend.api.openai.chat_schema import ChatRequest
from tercet.frontend.api.openai.completion_schema import CompletionRequest
from tercet.frontend.api.responses.conversation_schema import CreateConversation, UpdateConversation
from tercet.frontend.api.responses.schema import CreateResponse, TokenCount

HEADERS = {"user_profile_id", "workspace_id"}
"""Fields that Anthropic's client takes in a body and sends as headers."""
Seen = set[tuple[type, type[BaseModel]]]


class Unknown(NamedTuple):
    """A field that a client documents and no schema has."""

    where: str
    field: str


def classes(hint: Any) -> Iterator[Any]:
    """Yield the typed dictionaries, or models, in a type hint."""
    if is_typeddict(hint) or (isinstance(hint, type) and not get_args(hint) and issubclass(hint, BaseModel)):
        yield hint
    elif get_origin(hint) is not Literal:
        for each in get_args(hint):
            yield from classes(each)


def literals(hint: Any) -> Iterator[str]:
    if get_origin(hint) is Literal:
        yield from (each for each in get_args(hint) if isinstance(each, str))
    elif get_origin(hint) in (Union, UnionType, Annotated):
        for each in get_args(hint):
            yield from literals(each)


def kinds(fields: dict[str, Any]) -> set[str]:
    """Return the possible values of `type`, else of `role`: the kinds of a part, item, tool or message."""
    name = next((name for name in ("type", "role") if name in fields), None)
    return set(literals(fields[name])) if name else set()


def ours(model: type[BaseModel]) -> dict[str, Any]:
    return {field.alias or name: field.annotation for name, field in model.model_fields.items()}


def matching(theirs: type, candidates: list[type[BaseModel]]) -> list[type[BaseModel]]:
    """Return the models of the same kind; for a type without a kind, the models without one."""
    wanted = kinds(get_type_hints(theirs))
    return [each for each in candidates if wanted & kinds(ours(each)) or not (wanted or kinds(ours(each)))]


def unknown(params: type, model: type[BaseModel], seen: Seen) -> Iterator[Unknown]:
    """Yield the nested fields of `params` that `model` lacks. Unknown kinds are skipped, because they are refused."""
    if (params, model) in seen:
        return
    seen.add((params, model))
    known = ours(model)
    for name, hint in get_type_hints(params).items():
        if name not in known and name not in HEADERS:
            yield Unknown(params.__name__, name)
        candidates = list(classes(known.get(name)))
        for theirs in filter(is_typeddict, classes(hint)):
            for own in matching(theirs, candidates):
                yield from unknown(theirs, own, seen)


@pytest.mark.parametrize(
    ("params", "model", "reached"),
    [
        (CompletionCreateParamsNonStreaming, ChatRequest, {"RefusalPart", "Function", "InputGrammar", "CalledCustom"}),
        (TextParams, CompletionRequest, {"StreamOptions"}),
        (ResponseCreateParamsNonStreaming, CreateResponse, {"TextPart", "CustomTool", "InConversation", "OutputItem"}),
        (InputTokenCountParams, TokenCount, {"TextPart", "CustomTool", "InConversation"}),
        (ConversationCreateParams, CreateConversation, {"TextPart", "FunctionCallItem", "OutputItem"}),
        (ConversationUpdateParams, UpdateConversation, set()),
        (MessageCreateParamsNonStreaming, CreateMessage, {"TextBlock", "ToolResultBlock", "Tool"}),
    ],
    ids=["chat", "completions", "responses", "input tokens", "conversations", "metadata", "messages"],
)
def test_every_documented_field_is_known_however_deep(params: type, model: type[BaseModel], reached: set[str]) -> None:
    seen: Seen = set()
    assert list(unknown(params, model, seen)) == []
    assert reached <= {own.__name__ for _, own in seen}
