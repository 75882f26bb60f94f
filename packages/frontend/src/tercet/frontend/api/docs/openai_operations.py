"""Documentation of the routes of chats, completions, embeddings and models."""

from tercet.frontend.api.docs.examples import CREATED, QUESTION, READ, RID
from tercet.frontend.api.docs.openapi import MethodAndPath, Operation
from tercet.frontend.api.openai.chat_schema import ChatRequest
from tercet.frontend.api.openai.completion_schema import CompletionRequest
from tercet.frontend.api.openai.embedding_schema import EmbeddingCreate

_USAGE = {
    "prompt_tokens": 14,
    "completion_tokens": 3,
    "total_tokens": 17,
    "prompt_tokens_details": {"cached_tokens": 8},
    "completion_tokens_details": {"reasoning_tokens": 0},
}
_FINGERPRINT = "fp_0123456789ab"
_CARD = {"id": "embedded", "object": "model", "created": CREATED, "owned_by": "tercet", "max_model_len": 2048}

OPENAI: dict[MethodAndPath, Operation] = {
    ("POST", "/v1/chat/completions"): Operation(
        tag="OpenAI",
        summary="Create a chat completion.",
        answer="A chat.completion, or its chunks.",
        body=ChatRequest,
        example={"model": "embedded", "messages": QUESTION, "max_completion_tokens": 64},
        streams=True,
        response={
            "id": f"chatcmpl-{RID}",
            "created": CREATED,
            "model": "embedded",
            "system_fingerprint": _FINGERPRINT,
            "object": "chat.completion",
            "choices": [
                {
                    "index": 0,
                    "message": {"role": "assistant", "content": "It plans steps.", "refusal": None},
                    "logprobs": None,
                    "finish_reason": "stop",
                    "stop_reason": None,
                    "matched_stop": 0,
                }
            ],
            "usage": _USAGE,
        },
    ),
    ("POST", "/v1/completions"): Operation(
        tag="OpenAI",
        summary="Create completions of one or several prompts.",
        answer="A text_completion, or its chunks.",
        body=CompletionRequest,
        example={"model": "embedded", "prompt": "A tercet is", "max_tokens": 16},
        streams=True,
        response={
            "id": f"cmpl-{RID}",
            "object": "text_completion",
            "created": CREATED,
            "model": "embedded",
            "system_fingerprint": _FINGERPRINT,
            "choices": [
                {
                    "index": 0,
                    "text": " three lines.",
                    "logprobs": None,
                    "finish_reason": "stop",
                    "stop_reason": None,
                    "matched_stop": 0,
                }
            ],
            "usage": _USAGE,
        },
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
            "usage": READ,
            "data": [{"object": "embedding", "index": 0, "embedding": [0.25, -0.5, 0.125]}],
        },
    ),
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
}
