"""Documentation of every route: summary, example of a request, description and example of the response.

Tests keep this table equal to the routers, send each request and compare the response.
"""

from typing import Any

from tercet.frontend.api.anthropic.schema import CountTokens, CreateMessage
from tercet.frontend.api.docs.openapi import Operation, QueryParameter
from tercet.frontend.api.docs.stored_chat_operations import STORED_CHATS
from tercet.frontend.api.openai.chat_schema import ChatRequest
from tercet.frontend.api.openai.completion_schema import CompletionRequest
from tercet.frontend.api.openai.embedding_schema import ClassifyRequest, EmbeddingCreate, RerankRequest, ScoreRequest
from tercet.frontend.api.openai.embeddings import CLASSIFY_PATHS
from tercet.frontend.api.openai.rerank import RERANK_PATHS, SCORE_PATHS
from tercet.frontend.api.responses.conversation_schema import AddItems, CreateConversation, UpdateConversation
from tercet.frontend.api.responses.schema import CreateResponse, TokenCount
from tercet.frontend.api.sglang.adapter_routes import LOAD_PATHS, UNLOAD_PATHS, LoadAdapter, UnloadAdapter
from tercet.frontend.api.sglang.control_routes import AbortRequest, UpdateWeights
from tercet.frontend.api.sglang.generate_schema import Detokenize, NativeGenerate, Tokenize
from tercet.frontend.api.sglang.session_schema import CloseSession, OpenSession

_PAGE = [
    QueryParameter("limit", {"type": "integer", "minimum": 1, "maximum": 100}, "Items per page; 20 by default."),
    QueryParameter("after", {"type": "string"}, "Id of the last item of the previous page."),
    QueryParameter("order", {"enum": ["asc", "desc"]}, "Oldest first (asc) or newest first (desc); desc by default."),
]
_FIRST = {"type": "message", "role": "user", "content": "What is a scheduler?"}
_QUESTION = [{"role": "user", "content": "What is a scheduler?"}]

_USAGE = {
    "prompt_tokens": 14,
    "completion_tokens": 3,
    "total_tokens": 17,
    "prompt_tokens_details": {"cached_tokens": 8},
    "completion_tokens_details": {"reasoning_tokens": 0},
}
_READ = {"prompt_tokens": 9, "total_tokens": 9}
_FINGERPRINT = "fp_0123456789ab"
_RID = "frontend-0-0123456789abcdefghijklmn"
_RESPONSE_ID = f"resp_{_RID}"
_CREATED = 1767225600
_ASKED = {
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
    "created_at": _CREATED,
    "status": "completed",
    "background": False,
    "completed_at": _CREATED + 1,
    "conversation": None,
    "error": None,
    "incomplete_details": None,
    "instructions": None,
    "max_output_tokens": 64,
    "max_tool_calls": None,
    "model": "embedded",
    "output": [_SAID],
    "parallel_tool_calls": True,
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
_ITEMS = {
    "object": "list",
    "data": [_ASKED],
    "first_id": _ASKED["id"],
    "last_id": _ASKED["id"],
    "has_more": False,
}
_CONVERSATION = {
    "id": "conv_0123456789abcdef",
    "object": "conversation",
    "created_at": _CREATED,
    "metadata": {"topic": "schedulers"},
}
_CARD = {"id": "embedded", "object": "model", "created": _CREATED, "owned_by": "tercet", "max_model_len": 2048}
_OBEYED = {"success": True, "schedulers": {"scheduler-0": "done"}}
_SCHEDULER_LOAD = {
    "queued": 0,
    "running": 1,
    "queued_tokens": 0,
    "running_tokens": 40,
    "pages_total": 4096,
    "pages_free": 4000,
    "pages_cached": 56,
    "page_size": 16,
    "slots_total": 64,
    "slots_free": 63,
    "retractions": 0,
    "cached_prompt_tokens": 8,
    "prompt_tokens": 14,
    "output_tokens": 3,
    "updating": False,
    "drafted_tokens": 0,
    "accepted_tokens": 0,
}
_SERVER = {
    "version": "0.1.0",
    "wire_version": [1, 1],
    "frontend": "frontend-0",
    "ready": True,
    "requests_running": 1,
    "requests_waiting": 0,
    "requests_ended": {"finished": 12},
    "requests_over_limit": 0,
    "requests_resumed_and_finished": 0,
    "redispatches": {},
    "deaths": {},
    "models": [
        {
            "name": "embedded",
            "context_length": 2048,
            "max_total_tokens": 65536,
            "vocab_size": 4096,
            "weights": "0123456789abcdef",
            "grammars": "llguidance 1.9.1",
            "max_loras": 8,
            "has_chat_template": True,
        }
    ],
    "schedulers": [
        {
            "peer": "scheduler-0",
            "incarnation": "1",
            "ready": True,
            "phase": "step",
            "model": "embedded",
            "load": _SCHEDULER_LOAD,
        }
    ],
    "detokenizers": [
        {"peer": "detokenizer-0", "incarnation": "1", "ready": True, "phase": "step", "choices": 1},
    ],
}

_RANKED: dict[str, Any] = {
    "id": f"rerank-{_RID}",
    "model": "bge-reranker-v2-m3",
    "results": [{"index": 0, "relevance_score": 0.9, "document": {"text": "Three lines."}}],
    "usage": _READ,
}
_SCORED = {
    "id": f"score-{_RID}",
    "object": "list",
    "created": _CREATED,
    "model": "bge-reranker-v2-m3",
    "data": [{"index": 0, "object": "score", "score": 0.9}],
    "usage": _READ,
}
_CLASSIFIED = {
    "id": f"classify-{_RID}",
    "object": "list",
    "created": _CREATED,
    "model": "sentiment",
    "data": [{"index": 0, "label": "good", "probs": [0.1, 0.9], "num_classes": 2}],
    "usage": _READ,
}

_RERANK = Operation(
    tag="Scores",
    summary="Rank documents by relevance to a query, best first. Jina's and Cohere's format.",
    answer="Results with index and relevance_score.",
    body=RerankRequest,
    example={"model": "bge-reranker-v2-m3", "query": "What is a tercet?", "documents": ["Three lines.", "Rain."]},
    response=_RANKED,
)
_SCORE = Operation(
    tag="Scores",
    summary="Score pairs of texts. vLLM's format.",
    answer="A list of scores.",
    body=ScoreRequest,
    example={"model": "bge-reranker-v2-m3", "text_1": "What is a tercet?", "text_2": ["Three lines.", "Rain."]},
    response=_SCORED,
)
_CLASSIFY = Operation(
    tag="Scores",
    summary="Classify inputs: the label of each, and the probabilities of all labels. vLLM's format.",
    answer="A list of classes.",
    body=ClassifyRequest,
    example={"model": "sentiment", "input": "What a day!"},
    response=_CLASSIFIED,
)

_LOAD = Operation(
    tag="Control",
    summary="Load a LoRA adapter under a name that requests can use. Needs an admin key.",
    answer="The paths of all adapters, by name.",
    body=LoadAdapter,
    example={"lora_name": "haiku", "lora_path": "/adapters/haiku"},
    admin=True,
    response={"success": True, "loaded_adapters": {"haiku": "/adapters/haiku"}},
)
_UNLOAD = Operation(
    tag="Control",
    summary="Unload a LoRA adapter. Needs an admin key.",
    answer="The paths of the remaining adapters, by name.",
    body=UnloadAdapter,
    example={"lora_name": "haiku"},
    admin=True,
    response={"success": True, "loaded_adapters": {}},
)

OPERATIONS: dict[tuple[str, str], Operation] = {
    ("POST", "/v1/chat/completions"): Operation(
        tag="OpenAI",
        summary="Create a chat completion.",
        answer="A chat.completion, or its chunks.",
        body=ChatRequest,
        example={"model": "embedded", "messages": _QUESTION, "max_completion_tokens": 64},
        streams=True,
        response={
            "id": f"chatcmpl-{_RID}",
            "created": _CREATED,
            "model": "embedded",
            "system_fingerprint": _FINGERPRINT,
            "object": "chat.completion",
            "choices": [
                {
                    "index": 0,
                    "message": {"role": "assistant", "content": "It plans steps.", "refusal": None},
                    "logprobs": None,
                    "finish_reason": "stop",
                }
            ],
            "usage": _USAGE,
        },
    ),
    **STORED_CHATS,
    ("POST", "/v1/completions"): Operation(
        tag="OpenAI",
        summary="Create completions of one or several prompts.",
        answer="A text_completion, or its chunks.",
        body=CompletionRequest,
        example={"model": "embedded", "prompt": "A tercet is", "max_tokens": 16},
        streams=True,
        response={
            "id": f"cmpl-{_RID}",
            "object": "text_completion",
            "created": _CREATED,
            "model": "embedded",
            "system_fingerprint": _FINGERPRINT,
            "choices": [{"index": 0, "text": " three lines.", "logprobs": None, "finish_reason": "stop"}],
            "usage": _USAGE,
        },
    ),
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
    ("POST", "/v1/embeddings"): Operation(
        tag="OpenAI",
        summary="Create embeddings, one for each input.",
        answer="A list of embeddings, as numbers or as base64 of little-endian float32.",
        body=EmbeddingCreate,
        example={"model": "all-MiniLM-L6-v2", "input": ["A tercet is three lines.", "A sonnet is fourteen."]},
        response={
            "object": "list",
            "model": "all-MiniLM-L6-v2",
            "usage": _READ,
            "data": [{"object": "embedding", "index": 0, "embedding": [0.25, -0.5, 0.125]}],
        },
    ),
    **{("POST", path): _RERANK for path in RERANK_PATHS},
    **{("POST", path): _SCORE for path in SCORE_PATHS},
    **{("POST", path): _CLASSIFY for path in CLASSIFY_PATHS},
    ("GET", "/v1/models"): Operation(
        tag="OpenAI",
        summary="List the models.",
        answer="A list of models.",
        response={"object": "list", "data": [_CARD]},
    ),
    ("GET", "/v1/models/{model:path}"): Operation(
        tag="OpenAI",
        summary="Get a model by its id, which may contain slashes.",
        answer="A model.",
        response=_CARD,
    ),
    ("POST", "/v1/messages"): Operation(
        tag="Anthropic",
        summary="Create a message. Anthropic's format.",
        answer="A message, or its events.",
        body=CreateMessage,
        example={"model": "embedded", "messages": _QUESTION, "max_tokens": 64},
        streams=True,
        response={
            "id": f"msg_{_RID}",
            "type": "message",
            "role": "assistant",
            "model": "embedded",
            "content": [{"type": "text", "text": "It plans steps."}],
            "stop_reason": "end_turn",
            "stop_sequence": None,
            "usage": {
                "input_tokens": 6,
                "cache_creation_input_tokens": 0,
                "cache_read_input_tokens": 8,
                "output_tokens": 3,
                "output_tokens_details": {"thinking_tokens": 0},
            },
        },
    ),
    ("POST", "/v1/messages/count_tokens"): Operation(
        tag="Anthropic",
        summary="Count the tokens of a chat.",
        answer="The number.",
        body=CountTokens,
        example={"model": "embedded", "messages": _QUESTION},
        response={"input_tokens": 14},
    ),
    ("POST", "/generate"): Operation(
        tag="Native",
        summary="Generate from a text or token ids. SGLang's format.",
        answer="The text and its meta_info; a list for a list of prompts or n above 1.",
        lists=True,
        body=NativeGenerate,
        example={"text": "A tercet is", "sampling_params": {"max_new_tokens": 16, "temperature": 0.0}},
        streams=True,
        response={
            "index": 0,
            "text": " three lines.",
            "output_ids": [5, 6, 7],
            "meta_info": {
                "id": _RID,
                "finish_reason": {"type": "stop", "matched": 0},
                "prompt_tokens": 14,
                "completion_tokens": 3,
                "cached_tokens": 8,
            },
        },
    ),
    ("POST", "/open_session"): Operation(
        tag="Native",
        summary="Open a session, whose turns later prompts can continue with `session_params`.",
        answer="The session's id.",
        body=OpenSession,
        example={"capacity_of_str_len": 1024},
        response="0123456789abcdef0123456789abcdef",
    ),
    ("POST", "/close_session"): Operation(
        tag="Native",
        summary="Close a session.",
        answer="null",
        body=CloseSession,
        example={"session_id": "0123456789abcdef0123456789abcdef"},
        response=None,
    ),
    ("POST", "/tokenize"): Operation(
        tag="Native",
        summary="Tokenize a text, or a chat rendered by the model's template.",
        answer="The token ids and their number.",
        body=Tokenize,
        example={"prompt": "A tercet is"},
        response={"tokens": [5, 6, 7], "count": 3, "max_model_len": 2048},
    ),
    ("POST", "/detokenize"): Operation(
        tag="Native",
        summary="Turn token ids into text.",
        answer="The text.",
        body=Detokenize,
        example={"tokens": [5, 6, 7]},
        response={"prompt": "A tercet is", "text": "A tercet is"},
    ),
    ("POST", "/abort_request"): Operation(
        tag="Control",
        summary="Abort a request by its id, at any frontend; with an admin key, abort all requests.",
        answer="A confirmation.",
        body=AbortRequest,
        example={"rid": "frontend-0-0123456789abcdefghijklmn"},
        admin=True,
        response={"success": True},
    ),
    ("POST", "/flush_cache"): Operation(
        tag="Control",
        summary="Remove the cached prefixes that no running request uses. Needs an admin key.",
        answer="The reply of each scheduler.",
        admin=True,
        response=_OBEYED,
    ),
    ("POST", "/pause_generation"): Operation(
        tag="Control",
        summary="Pause generation; requests are kept. Needs an admin key.",
        answer="The reply of each scheduler.",
        admin=True,
        response=_OBEYED,
    ),
    ("POST", "/continue_generation"): Operation(
        tag="Control",
        summary="Resume generation after a pause. Needs an admin key.",
        answer="The reply of each scheduler.",
        admin=True,
        response=_OBEYED,
    ),
    ("POST", "/update_weights_from_disk"): Operation(
        tag="Control",
        summary="Load new weights of a model after running requests have finished. Needs an admin key.",
        answer="The fingerprint of each scheduler's weights.",
        body=UpdateWeights,
        example={"model_path": "/checkpoints/step-700"},
        admin=True,
        response={
            "success": True,
            "message": "The weights are those of /checkpoints/step-700.",
            "weights": {"scheduler-0": "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08"},
        },
    ),
    **{("POST", path): _LOAD for path in LOAD_PATHS},
    **{("POST", path): _UNLOAD for path in UNLOAD_PATHS},
    ("GET", "/server_info"): Operation(
        tag="Operation",
        summary="Get the models, limits, and the load of every part.",
        answer="Information on the server.",
        response=_SERVER,
    ),
    ("GET", "/health"): Operation(
        tag="Operation",
        summary="Report whether requests can be served now. Needs no key.",
        answer="Requests can be served.",
        response={"status": "ok"},
    ),
    ("GET", "/live"): Operation(
        tag="Operation",
        summary="Report that this process is alive. Needs no key.",
        answer="The process is alive.",
        response={"status": "ok"},
    ),
    ("GET", "/metrics"): Operation(
        tag="Operation",
        summary="Get the metrics for Prometheus.",
        answer="Prometheus' text format.",
        media_type="text/plain",
        response="# HELP tercet_requests_waiting Requests that no part takes.\n"
        "# TYPE tercet_requests_waiting gauge\n"
        'tercet_requests_waiting{frontend="frontend-0"} 0\n',
    ),
    ("GET", "/openapi.json"): Operation(
        tag="Operation",
        summary="Get this document.",
        answer="An OpenAPI 3.1 document.",
        response={
            "openapi": "3.1.0",
            "info": {"title": "Tercet", "version": "0.1.0", "description": "Open language models."},
            "security": [{"bearer": []}],
            "paths": {},
            "components": {"securitySchemes": {}, "schemas": {}},
        },
    ),
}
