"""Summary, request example and response description of every route.

A test keeps this table equal to the router.
"""

from tercet.frontend.api.anthropic.schema import CountTokens, CreateMessage
from tercet.frontend.api.docs.openapi import Operation, QueryParameter
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

_RERANK = Operation(
    tag="Scores",
    summary="Rank documents by relevance to a query, best first. Jina's and Cohere's format.",
    answer="Results with index and relevance_score.",
    body=RerankRequest,
    example={"model": "bge-reranker-v2-m3", "query": "What is a tercet?", "documents": ["Three lines.", "Rain."]},
)
_SCORE = Operation(
    tag="Scores",
    summary="Score pairs of texts. vLLM's format.",
    answer="A list of scores.",
    body=ScoreRequest,
    example={"model": "bge-reranker-v2-m3", "text_1": "What is a tercet?", "text_2": ["Three lines.", "Rain."]},
)
_CLASSIFY = Operation(
    tag="Scores",
    summary="Classify inputs: the label of each, and the probabilities of all labels. vLLM's format.",
    answer="A list of classes.",
    body=ClassifyRequest,
    example={"model": "sentiment", "input": "What a day!"},
)

_LOAD = Operation(
    tag="Control",
    summary="Load a LoRA adapter under a name that requests can use. Needs an admin key.",
    answer="The paths of all adapters, by name.",
    body=LoadAdapter,
    example={"lora_name": "haiku", "lora_path": "/adapters/haiku"},
    admin=True,
)
_UNLOAD = Operation(
    tag="Control",
    summary="Unload a LoRA adapter. Needs an admin key.",
    answer="The paths of the remaining adapters, by name.",
    body=UnloadAdapter,
    example={"lora_name": "haiku"},
    admin=True,
)

OPERATIONS: dict[tuple[str, str], Operation] = {
    ("POST", "/v1/chat/completions"): Operation(
        tag="OpenAI",
        summary="Create a chat completion.",
        answer="A chat.completion, or its chunks.",
        body=ChatRequest,
        example={"model": "embedded", "messages": _QUESTION, "max_completion_tokens": 64},
        streams=True,
    ),
    ("POST", "/v1/completions"): Operation(
        tag="OpenAI",
        summary="Create completions of one or several prompts.",
        answer="A text_completion, or its chunks.",
        body=CompletionRequest,
        example={"model": "embedded", "prompt": "A tercet is", "max_tokens": 16},
        streams=True,
    ),
    ("POST", "/v1/responses"): Operation(
        tag="Responses",
        summary="Create a response and store it; with `background` the client need not wait for it.",
        answer="A response, or its events.",
        body=CreateResponse,
        example={"model": "embedded", "input": "What is a scheduler?", "max_output_tokens": 64},
        streams=True,
    ),
    ("POST", "/v1/responses/input_tokens"): Operation(
        tag="Responses",
        summary="Count the tokens of an input.",
        answer="The number.",
        body=TokenCount,
        example={"model": "embedded", "input": "What is a scheduler?"},
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
    ),
    ("DELETE", "/v1/responses/{response_id}"): Operation(
        tag="Responses", summary="Delete a stored response.", answer="A confirmation."
    ),
    ("POST", "/v1/responses/{response_id}/cancel"): Operation(
        tag="Responses", summary="Cancel a background response.", answer="The cancelled response."
    ),
    ("GET", "/v1/responses/{response_id}/input_items"): Operation(
        tag="Responses",
        summary="List the input items of a stored response, earlier turns included.",
        answer="A page of items.",
        query=_PAGE,
    ),
    ("POST", "/v1/conversations"): Operation(
        tag="Conversations",
        summary="Create a conversation, which responses can continue.",
        answer="A conversation.",
        body=CreateConversation,
        example={"items": [_FIRST], "metadata": {"topic": "schedulers"}},
    ),
    ("GET", "/v1/conversations/{conversation_id}"): Operation(
        tag="Conversations", summary="Get a conversation, without its items.", answer="A conversation."
    ),
    ("POST", "/v1/conversations/{conversation_id}"): Operation(
        tag="Conversations",
        summary="Replace the metadata of a conversation.",
        answer="The conversation.",
        body=UpdateConversation,
        example={"metadata": {"topic": "sonnets"}},
    ),
    ("DELETE", "/v1/conversations/{conversation_id}"): Operation(
        tag="Conversations", summary="Delete a conversation and its items.", answer="A confirmation."
    ),
    ("POST", "/v1/conversations/{conversation_id}/items"): Operation(
        tag="Conversations",
        summary="Add items to the end of a conversation.",
        answer="A list of the added items.",
        body=AddItems,
        example={"items": [_FIRST]},
    ),
    ("GET", "/v1/conversations/{conversation_id}/items"): Operation(
        tag="Conversations", summary="List the items of a conversation.", answer="A page of items.", query=_PAGE
    ),
    ("GET", "/v1/conversations/{conversation_id}/items/{item_id}"): Operation(
        tag="Conversations", summary="Get an item of a conversation.", answer="The item."
    ),
    ("DELETE", "/v1/conversations/{conversation_id}/items/{item_id}"): Operation(
        tag="Conversations", summary="Delete an item of a conversation.", answer="The conversation."
    ),
    ("POST", "/v1/embeddings"): Operation(
        tag="OpenAI",
        summary="Create embeddings, one for each input.",
        answer="A list of embeddings, as numbers or as base64 of little-endian float32.",
        body=EmbeddingCreate,
        example={"model": "all-MiniLM-L6-v2", "input": ["A tercet is three lines.", "A sonnet is fourteen."]},
    ),
    **{("POST", path): _RERANK for path in RERANK_PATHS},
    **{("POST", path): _SCORE for path in SCORE_PATHS},
    **{("POST", path): _CLASSIFY for path in CLASSIFY_PATHS},
    ("GET", "/v1/models"): Operation(tag="OpenAI", summary="List the models.", answer="A list of models."),
    ("GET", "/v1/models/{model:path}"): Operation(
        tag="OpenAI", summary="Get a model by its id, which may contain slashes.", answer="A model."
    ),
    ("POST", "/v1/messages"): Operation(
        tag="Anthropic",
        summary="Create a message. Anthropic's format.",
        answer="A message, or its events.",
        body=CreateMessage,
        example={"model": "embedded", "messages": _QUESTION, "max_tokens": 64},
        streams=True,
    ),
    ("POST", "/v1/messages/count_tokens"): Operation(
        tag="Anthropic",
        summary="Count the tokens of a chat.",
        answer="The number.",
        body=CountTokens,
        example={"model": "embedded", "messages": _QUESTION},
    ),
    ("POST", "/generate"): Operation(
        tag="Native",
        summary="Generate from a text or token ids. SGLang's format.",
        answer="The text and its meta_info; a list for a list of prompts or n above 1.",
        lists=True,
        body=NativeGenerate,
        example={"text": "A tercet is", "sampling_params": {"max_new_tokens": 16, "temperature": 0.0}},
        streams=True,
    ),
    ("POST", "/open_session"): Operation(
        tag="Native",
        summary="Open a session, whose turns later prompts can continue with `session_params`.",
        answer="The session's id.",
        body=OpenSession,
        example={"capacity_of_str_len": 1024},
    ),
    ("POST", "/close_session"): Operation(
        tag="Native",
        summary="Close a session.",
        answer="null",
        body=CloseSession,
        example={"session_id": "0123456789abcdef0123456789abcdef"},
    ),
    ("POST", "/tokenize"): Operation(
        tag="Native",
        summary="Tokenize a text, or a chat rendered by the model's template.",
        answer="The token ids and their number.",
        body=Tokenize,
        example={"prompt": "A tercet is"},
    ),
    ("POST", "/detokenize"): Operation(
        tag="Native",
        summary="Turn token ids into text.",
        answer="The text.",
        body=Detokenize,
        example={"tokens": [5, 6, 7]},
    ),
    ("POST", "/abort_request"): Operation(
        tag="Control",
        summary="Abort a request by its id, at any frontend; with an admin key, abort all requests.",
        answer="A confirmation.",
        body=AbortRequest,
        example={"rid": "frontend-0-0123456789abcdefghijklmn"},
        admin=True,
    ),
    ("POST", "/flush_cache"): Operation(
        tag="Control",
        summary="Remove the cached prefixes that no running request uses. Needs an admin key.",
        answer="The reply of each scheduler.",
        admin=True,
    ),
    ("POST", "/pause_generation"): Operation(
        tag="Control",
        summary="Pause generation; requests are kept. Needs an admin key.",
        answer="The reply of each scheduler.",
        admin=True,
    ),
    ("POST", "/continue_generation"): Operation(
        tag="Control",
        summary="Resume generation after a pause. Needs an admin key.",
        answer="The reply of each scheduler.",
        admin=True,
    ),
    ("POST", "/update_weights_from_disk"): Operation(
        tag="Control",
        summary="Load new weights of a model after running requests have finished. Needs an admin key.",
        answer="The fingerprint of each scheduler's weights.",
        body=UpdateWeights,
        example={"model_path": "/checkpoints/step-700"},
        admin=True,
    ),
    **{("POST", path): _LOAD for path in LOAD_PATHS},
    **{("POST", path): _UNLOAD for path in UNLOAD_PATHS},
    ("GET", "/server_info"): Operation(
        tag="Operation",
        summary="Get the models, limits, and the load of every part.",
        answer="Information on the server.",
    ),
    ("GET", "/health"): Operation(
        tag="Operation",
        summary="Report whether requests can be served now. Needs no key.",
        answer="Requests can be served.",
    ),
    ("GET", "/live"): Operation(
        tag="Operation", summary="Report that this process is alive. Needs no key.", answer="The process is alive."
    ),
    ("GET", "/metrics"): Operation(
        tag="Operation",
        summary="Get the metrics for Prometheus.",
        answer="Prometheus' text format.",
        media_type="text/plain",
    ),
    ("GET", "/openapi.json"): Operation(
        tag="Operation", summary="Get this document.", answer="An OpenAPI 3.1 document."
    ),
}
