"""Example response of every route.

A test sends a request to every route and compares.
"""

from typing import Any

from tercet.frontend.api.openai.embeddings import CLASSIFY_PATHS
from tercet.frontend.api.openai.rerank import RERANK_PATHS, SCORE_PATHS
from tercet.frontend.api.sglang.adapter_routes import LOAD_PATHS, UNLOAD_PATHS

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
_LOAD = {
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
            "load": _LOAD,
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

ANSWERS: dict[tuple[str, str], Any] = {
    ("POST", "/v1/chat/completions"): {
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
    ("POST", "/v1/completions"): {
        "id": f"cmpl-{_RID}",
        "object": "text_completion",
        "created": _CREATED,
        "model": "embedded",
        "system_fingerprint": _FINGERPRINT,
        "choices": [{"index": 0, "text": " three lines.", "logprobs": None, "finish_reason": "stop"}],
        "usage": _USAGE,
    },
    ("POST", "/v1/responses"): _RESPONSE,
    ("POST", "/v1/responses/input_tokens"): {"object": "response.input_tokens", "input_tokens": 14},
    ("GET", "/v1/responses/{response_id}"): _RESPONSE,
    ("DELETE", "/v1/responses/{response_id}"): {"id": _RESPONSE_ID, "object": "response", "deleted": True},
    ("POST", "/v1/responses/{response_id}/cancel"): {**_RESPONSE, "status": "cancelled", "background": True},
    ("GET", "/v1/responses/{response_id}/input_items"): _ITEMS,
    ("POST", "/v1/conversations"): _CONVERSATION,
    ("GET", "/v1/conversations/{conversation_id}"): _CONVERSATION,
    ("POST", "/v1/conversations/{conversation_id}"): {**_CONVERSATION, "metadata": {"topic": "sonnets"}},
    ("DELETE", "/v1/conversations/{conversation_id}"): {
        "id": _CONVERSATION["id"],
        "object": "conversation.deleted",
        "deleted": True,
    },
    ("POST", "/v1/conversations/{conversation_id}/items"): _ITEMS,
    ("GET", "/v1/conversations/{conversation_id}/items"): _ITEMS,
    ("GET", "/v1/conversations/{conversation_id}/items/{item_id}"): _ASKED,
    ("DELETE", "/v1/conversations/{conversation_id}/items/{item_id}"): _CONVERSATION,
    ("POST", "/v1/embeddings"): {
        "object": "list",
        "model": "all-MiniLM-L6-v2",
        "usage": _READ,
        "data": [{"object": "embedding", "index": 0, "embedding": [0.25, -0.5, 0.125]}],
    },
    **{("POST", path): _RANKED for path in RERANK_PATHS},
    **{("POST", path): _SCORED for path in SCORE_PATHS},
    **{("POST", path): _CLASSIFIED for path in CLASSIFY_PATHS},
    ("GET", "/v1/models"): {"object": "list", "data": [_CARD]},
    ("GET", "/v1/models/{model:path}"): _CARD,
    ("POST", "/v1/messages"): {
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
    ("POST", "/v1/messages/count_tokens"): {"input_tokens": 14},
    ("POST", "/generate"): {
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
    ("POST", "/open_session"): "0123456789abcdef0123456789abcdef",
    ("POST", "/close_session"): None,
    ("POST", "/tokenize"): {"tokens": [5, 6, 7], "count": 3, "max_model_len": 2048},
    ("POST", "/detokenize"): {"prompt": "A tercet is", "text": "A tercet is"},
    ("POST", "/abort_request"): {"success": True},
    ("POST", "/flush_cache"): _OBEYED,
    ("POST", "/pause_generation"): _OBEYED,
    ("POST", "/continue_generation"): _OBEYED,
    ("POST", "/update_weights_from_disk"): {
        "success": True,
        "message": "The weights are those of /checkpoints/step-700.",
        "weights": {"scheduler-0": "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08"},
    },
    **{("POST", path): {"success": True, "loaded_adapters": {"haiku": "/adapters/haiku"}} for path in LOAD_PATHS},
    **{("POST", path): {"success": True, "loaded_adapters": {}} for path in UNLOAD_PATHS},
    ("GET", "/server_info"): _SERVER,
    ("GET", "/health"): {"status": "ok"},
    ("GET", "/live"): {"status": "ok"},
    ("GET", "/metrics"): (
        "# HELP tercet_requests_waiting Requests that no part takes.\n"
        "# TYPE tercet_requests_waiting gauge\n"
        'tercet_requests_waiting{frontend="frontend-0"} 0\n'
    ),
    ("GET", "/openapi.json"): {
        "openapi": "3.1.0",
        "info": {"title": "Tercet", "version": "0.1.0", "description": "Open language models."},
        "security": [{"bearer": []}],
        "paths": {},
        "components": {"securitySchemes": {}, "schemas": {}},
    },
}
