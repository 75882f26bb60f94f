"""Documentation of the routes of stored chat completions."""

from typing import Any

from tercet.frontend.api.docs.examples import RID
from tercet.frontend.api.docs.openai_operations import OPENAI
from tercet.frontend.api.docs.openapi import MethodAndPath, Operation, QueryParameter, page_parameters
from tercet.frontend.api.openai.stored.routes import UpdateChatCompletion
from tercet.frontend.http.list_page import listed

_ID = f"chatcmpl-{RID}"
_PAGE = page_parameters("entries", "Oldest first (asc, the default) or newest first (desc).")
_STORED: dict[str, Any] = {
    **OPENAI["POST", "/v1/chat/completions"].response,
    "request_id": "req_0123456789abcdef0123456789abcdef",
    "tools": None,
    "tool_choice": None,
    "response_format": None,
    "seed": None,
    "temperature": 1.0,
    "top_p": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "input_user": None,
    "service_tier": "default",
    "metadata": {"topic": "schedulers"},
}
_MESSAGE: dict[str, Any] = {
    "id": f"{_ID}-0",
    "refusal": None,
    "name": None,
    "role": "user",
    "content": "What is a scheduler?",
    "content_parts": None,
}

STORED_CHATS: dict[MethodAndPath, Operation] = {
    ("GET", "/v1/chat/completions"): Operation(
        tag="Stored chats",
        summary="List the stored chat completions.",
        answer="A page of completions.",
        query=[
            QueryParameter("model", {"type": "string"}, "Only completions of this model."),
            QueryParameter("metadata[key]", {"type": "string"}, "Only completions with this entry of the metadata."),
            *_PAGE,
        ],
        response=listed([(_ID, _STORED)]),
    ),
    ("GET", "/v1/chat/completions/{completion_id}"): Operation(
        tag="Stored chats",
        summary="Get a stored chat completion.",
        answer="The completion.",
        response=_STORED,
    ),
    ("POST", "/v1/chat/completions/{completion_id}"): Operation(
        tag="Stored chats",
        summary="Replace the metadata of a stored chat completion.",
        answer="The completion.",
        body=UpdateChatCompletion,
        example={"metadata": {"topic": "schedulers"}},
        response=_STORED,
    ),
    ("DELETE", "/v1/chat/completions/{completion_id}"): Operation(
        tag="Stored chats",
        summary="Delete a stored chat completion and its messages.",
        answer="A confirmation.",
        response={"id": _ID, "object": "chat.completion.deleted", "deleted": True},
    ),
    ("GET", "/v1/chat/completions/{completion_id}/messages"): Operation(
        tag="Stored chats",
        summary="List the messages of the request that a stored chat completion answers.",
        answer="A page of messages.",
        query=_PAGE,
        response=listed([(_MESSAGE["id"], _MESSAGE)]),
    ),
}
