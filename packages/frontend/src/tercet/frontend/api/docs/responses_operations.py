"""Documentation of the routes of responses and conversations."""

from typing import Any

from tercet.frontend.api.docs.examples import CREATED, RID
from tercet.frontend.api.docs.openapi import MethodAndPath, Operation, QueryParameter, page_parameters
from tercet.frontend.api.responses.conversation_schema import AddItems, CreateConversation, UpdateConversation
from tercet.frontend.api.responses.schema import CreateResponse, TokenCount
from tercet.frontend.http.list_page import listed

_PAGE = page_parameters("items", "Oldest first (asc) or newest first (desc); desc by default.")
_FIRST = {"type": "message", "role": "user", "content": "What is a scheduler?"}
_RESPONSE_ID = f"resp_{RID}"
_ASKED: dict[str, Any] = {
    "type": "message",
    "role": "user",
    "content": [{"type": "input_text", "text": "What is a scheduler?"}],
    "id": "msg_0123456789abcdef",
    "status": "completed",
}
_SAID = {
    "id": "msg_fedcba9876543210",
    "status": "completed",
    "type": "message",
    "role": "assistant",
    "content": [{"type": "output_text", "text": "It plans steps.", "annotations": [], "logprobs": []}],
}
_RESPONSE = {
    "id": _RESPONSE_ID,
    "object": "response",
    "created_at": CREATED,
    "status": "completed",
    "background": False,
    "completed_at": CREATED + 1,
    "conversation": None,
    "error": None,
    "frequency_penalty": 0.0,
    "incomplete_details": None,
    "instructions": None,
    "max_output_tokens": 64,
    "max_tool_calls": None,
    "model": "embedded",
    "output": [_SAID],
    "parallel_tool_calls": True,
    "presence_penalty": 0.0,
    "previous_response_id": None,
    "prompt_cache_key": None,
    "reasoning": {"effort": None, "summary": None},
    "safety_identifier": None,
    "service_tier": "default",
    "store": True,
    "temperature": 1.0,
    "text": {"format": {"type": "text"}},
    "tool_choice": "auto",
    "tools": [],
    "top_logprobs": 0,
    "top_p": 1.0,
    "truncation": "disabled",
    "usage": {
        "input_tokens": 14,
        "input_tokens_details": {"cached_tokens": 8, "cache_write_tokens": 0},
        "output_tokens": 3,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": 17,
    },
    "user": None,
    "metadata": {},
}
_ITEMS = listed([(_ASKED["id"], _ASKED)])
_CONVERSATION = {
    "id": "conv_0123456789abcdef",
    "object": "conversation",
    "created_at": CREATED,
    "metadata": {"topic": "schedulers"},
}

RESPONSES: dict[MethodAndPath, Operation] = {
    ("POST", "/v1/responses"): Operation(
        tag="Responses",
        summary="Create a response and store it; with `background` the client need not wait for it.",
        answer="A response, or its events.",
        body=CreateResponse,
        example={"model": "embedded", "input": "What is a scheduler?", "max_output_tokens": 64},
        streams=True,
        response=_RESPONSE,
    ),
    ("POST", "/v1/responses/input_tokens"): Operation(
        tag="Responses",
        summary="Count the tokens of an input.",
        answer="The number.",
        body=TokenCount,
        example={"model": "embedded", "input": "What is a scheduler?"},
        response={"object": "response.input_tokens", "input_tokens": 14},
    ),
    ("GET", "/v1/responses/{response_id}"): Operation(
        tag="Responses",
        summary="Get a stored response, or the events of a background response.",
        answer="A response, or its events.",
        query=[
            QueryParameter("stream", {"enum": ["true", "false"]}, "Stream the events."),
            QueryParameter(
                "starting_after", {"type": "integer", "minimum": 0}, "Only events with a higher sequence number."
            ),
        ],
        response=_RESPONSE,
    ),
    ("DELETE", "/v1/responses/{response_id}"): Operation(
        tag="Responses",
        summary="Delete a stored response.",
        answer="A confirmation.",
        response={"id": _RESPONSE_ID, "object": "response", "deleted": True},
    ),
    ("POST", "/v1/responses/{response_id}/cancel"): Operation(
        tag="Responses",
        summary="Cancel a background response.",
        answer="The cancelled response.",
        response={**_RESPONSE, "status": "cancelled", "background": True},
    ),
    ("GET", "/v1/responses/{response_id}/input_items"): Operation(
        tag="Responses",
        summary="List the input items of a stored response, earlier turns included.",
        answer="A page of items.",
        query=_PAGE,
        response=_ITEMS,
    ),
    ("POST", "/v1/conversations"): Operation(
        tag="Conversations",
        summary="Create a conversation, which responses can continue.",
        answer="A conversation.",
        body=CreateConversation,
        example={"items": [_FIRST], "metadata": {"topic": "schedulers"}},
        response=_CONVERSATION,
    ),
    ("GET", "/v1/conversations/{conversation_id}"): Operation(
        tag="Conversations",
        summary="Get a conversation, without its items.",
        answer="A conversation.",
        response=_CONVERSATION,
    ),
    ("POST", "/v1/conversations/{conversation_id}"): Operation(
        tag="Conversations",
        summary="Replace the metadata of a conversation.",
        answer="The conversation.",
        body=UpdateConversation,
        example={"metadata": {"topic": "sonnets"}},
        response={**_CONVERSATION, "metadata": {"topic": "sonnets"}},
    ),
    ("DELETE", "/v1/conversations/{conversation_id}"): Operation(
        tag="Conversations",
        summary="Delete a conversation and its items.",
        answer="A confirmation.",
        response={
            "id": _CONVERSATION["id"],
            "object": "conversation.deleted",
            "deleted": True,
        },
    ),
    ("POST", "/v1/conversations/{conversation_id}/items"): Operation(
        tag="Conversations",
        summary="Add items to the end of a conversation.",
        answer="A list of the added items.",
        body=AddItems,
        example={"items": [_FIRST]},
        response=_ITEMS,
    ),
    ("GET", "/v1/conversations/{conversation_id}/items"): Operation(
        tag="Conversations",
        summary="List the items of a conversation.",
        answer="A page of items.",
        query=_PAGE,
        response=_ITEMS,
    ),
    ("GET", "/v1/conversations/{conversation_id}/items/{item_id}"): Operation(
        tag="Conversations",
        summary="Get an item of a conversation.",
        answer="The item.",
        response=_ASKED,
    ),
    ("DELETE", "/v1/conversations/{conversation_id}/items/{item_id}"): Operation(
        tag="Conversations",
        summary="Delete an item of a conversation.",
        answer="The conversation.",
        response=_CONVERSATION,
    ),
}
