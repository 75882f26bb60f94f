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
    QueryParameter("limit", {"type": "integer", "minimum": 1, "maximum": 100}, "Items a page; by default 20."),
    QueryParameter("after", {"type": "string"}, "The last item of the page before."),
    QueryParameter("order", {"enum": ["asc", "desc"]}, "Oldest or newest first; desc by default."),
]
_FIRST = {"type": "message", "role": "user", "content": "What is a scheduler?"}
_QUESTION = [{"role": "user", "content": "What is a scheduler?"}]

_RERANK = Operation(
    tag="Scores",
    summary="Documents by their relevance to a query, the best first, in Jina's and Cohere's words.",
    answer="Results with index and relevance_score.",
    body=RerankRequest,
    example={"model": "bge-reranker-v2-m3", "query": "What is a tercet?", "documents": ["Three lines.", "Rain."]},
)
_SCORE = Operation(
    tag="Scores",
    summary="How well texts go together, pair by pair, in vLLM's words.",
    answer="A list of scores.",
    body=ScoreRequest,
    example={"model": "bge-reranker-v2-m3", "text_1": "What is a tercet?", "text_2": ["Three lines.", "Rain."]},
)
_CLASSIFY = Operation(
    tag="Scores",
    summary="The label of each input, and every label's share, in vLLM's words.",
    answer="A list of classes.",
    body=ClassifyRequest,
    example={"model": "sentiment", "input": "What a day!"},
)

_LOAD = Operation(
    tag="Control",
    summary="Give a name to a LoRA adapter, which requests then know it by. Needs an admin key.",
    answer="Every adapter's path, by name.",
    body=LoadAdapter,
    example={"lora_name": "haiku", "lora_path": "/adapters/haiku"},
    admin=True,
)
_UNLOAD = Operation(
    tag="Control",
    summary="Take the name of an adapter away. Needs an admin key.",
    answer="The path of every other adapter, by name.",
    body=UnloadAdapter,
    example={"lora_name": "haiku"},
    admin=True,
)

OPERATIONS: dict[tuple[str, str], Operation] = {
    ("POST", "/v1/chat/completions"): Operation(
        tag="OpenAI",
        summary="Go on with a chat.",
        answer="A chat.completion, or its chunks.",
        body=ChatRequest,
        example={"model": "embedded", "messages": _QUESTION, "max_completion_tokens": 64},
        streams=True,
    ),
    ("POST", "/v1/completions"): Operation(
        tag="OpenAI",
        summary="Go on with a text, or with several.",
        answer="A text_completion, or its chunks.",
        body=CompletionRequest,
        example={"model": "embedded", "prompt": "A tercet is", "max_tokens": 16},
        streams=True,
    ),
    ("POST", "/v1/responses"): Operation(
        tag="Responses",
        summary="Answer an input of items, and keep the answer; with `background` nobody has to wait for it.",
        answer="A response, or its events.",
        body=CreateResponse,
        example={"model": "embedded", "input": "What is a scheduler?", "max_output_tokens": 64},
        streams=True,
    ),
    ("POST", "/v1/responses/input_tokens"): Operation(
        tag="Responses",
        summary="How many tokens an input has.",
        answer="The number.",
        body=TokenCount,
        example={"model": "embedded", "input": "What is a scheduler?"},
    ),
    ("GET", "/v1/responses/{response_id}"): Operation(
        tag="Responses",
        summary="A stored response as it stands, or the events of one made in the background.",
        answer="A response, or its events.",
        query=[
            QueryParameter("stream", {"enum": ["true", "false"]}, "Its events, as they come."),
            QueryParameter("starting_after", {"type": "integer", "minimum": 0}, "Only events numbered above this."),
        ],
    ),
    ("DELETE", "/v1/responses/{response_id}"): Operation(
        tag="Responses", summary="Forget a stored response.", answer="That it is so."
    ),
    ("POST", "/v1/responses/{response_id}/cancel"): Operation(
        tag="Responses", summary="End a response that is made in the background.", answer="The response as it stands."
    ),
    ("GET", "/v1/responses/{response_id}/input_items"): Operation(
        tag="Responses",
        summary="What a stored response was made from, with all before it.",
        answer="A page of items.",
        query=_PAGE,
    ),
    ("POST", "/v1/conversations"): Operation(
        tag="Conversations",
        summary="Begin a conversation, which responses go on with.",
        answer="A conversation.",
        body=CreateConversation,
        example={"items": [_FIRST], "metadata": {"topic": "schedulers"}},
    ),
    ("GET", "/v1/conversations/{conversation_id}"): Operation(
        tag="Conversations", summary="A conversation, without its items.", answer="A conversation."
    ),
    ("POST", "/v1/conversations/{conversation_id}"): Operation(
        tag="Conversations",
        summary="Give a conversation other metadata.",
        answer="The conversation.",
        body=UpdateConversation,
        example={"metadata": {"topic": "sonnets"}},
    ),
    ("DELETE", "/v1/conversations/{conversation_id}"): Operation(
        tag="Conversations", summary="Forget a conversation with its items.", answer="That it is so."
    ),
    ("POST", "/v1/conversations/{conversation_id}/items"): Operation(
        tag="Conversations",
        summary="Add items to the end of a conversation.",
        answer="A list of those items.",
        body=AddItems,
        example={"items": [_FIRST]},
    ),
    ("GET", "/v1/conversations/{conversation_id}/items"): Operation(
        tag="Conversations", summary="The items of a conversation.", answer="A page of items.", query=_PAGE
    ),
    ("GET", "/v1/conversations/{conversation_id}/items/{item_id}"): Operation(
        tag="Conversations", summary="One item of a conversation.", answer="The item."
    ),
    ("DELETE", "/v1/conversations/{conversation_id}/items/{item_id}"): Operation(
        tag="Conversations", summary="Take an item out of a conversation.", answer="The conversation."
    ),
    ("POST", "/v1/embeddings"): Operation(
        tag="OpenAI",
        summary="A vector for each input.",
        answer="A list of embeddings, as numbers or as base64 of little-endian float32.",
        body=EmbeddingCreate,
        example={"model": "all-MiniLM-L6-v2", "input": ["A tercet is three lines.", "A sonnet is fourteen."]},
    ),
    **{("POST", path): _RERANK for path in RERANK_PATHS},
    **{("POST", path): _SCORE for path in SCORE_PATHS},
    **{("POST", path): _CLASSIFY for path in CLASSIFY_PATHS},
    ("GET", "/v1/models"): Operation(tag="OpenAI", summary="The models served here.", answer="A list of models."),
    ("GET", "/v1/models/{model:path}"): Operation(
        tag="OpenAI", summary="One model, by its id, which may have slashes.", answer="A model."
    ),
    ("POST", "/v1/messages"): Operation(
        tag="Anthropic",
        summary="Go on with a chat, in Anthropic's words.",
        answer="A message, or its events.",
        body=CreateMessage,
        example={"model": "embedded", "messages": _QUESTION, "max_tokens": 64},
        streams=True,
    ),
    ("POST", "/v1/messages/count_tokens"): Operation(
        tag="Anthropic",
        summary="How many tokens a chat has.",
        answer="The number.",
        body=CountTokens,
        example={"model": "embedded", "messages": _QUESTION},
    ),
    ("POST", "/generate"): Operation(
        tag="Native",
        summary="Go on with a text or with token ids, in SGLang's words.",
        answer="The text, and meta_info about it; a list of them for a list of prompts, or n above 1.",
        lists=True,
        body=NativeGenerate,
        example={"text": "A tercet is", "sampling_params": {"max_new_tokens": 16, "temperature": 0.0}},
        streams=True,
    ),
    ("POST", "/open_session"): Operation(
        tag="Native",
        summary="Open a session, whose prompts may go on from one another by `session_params`.",
        answer="The session's id.",
        body=OpenSession,
        example={"capacity_of_str_len": 1024},
    ),
    ("POST", "/close_session"): Operation(
        tag="Native",
        summary="Forget a session.",
        answer="null",
        body=CloseSession,
        example={"session_id": "0123456789abcdef0123456789abcdef"},
    ),
    ("POST", "/tokenize"): Operation(
        tag="Native",
        summary="The token ids of a text, or of a chat as the model's template renders it.",
        answer="Ids and their number.",
        body=Tokenize,
        example={"prompt": "A tercet is"},
    ),
    ("POST", "/detokenize"): Operation(
        tag="Native",
        summary="The text of token ids.",
        answer="The text.",
        body=Detokenize,
        example={"tokens": [5, 6, 7]},
    ),
    ("POST", "/abort_request"): Operation(
        tag="Control",
        summary="End a request by its id, at whatever frontend it is; with an admin key, all requests.",
        answer="That it is so.",
        body=AbortRequest,
        example={"rid": "frontend-0-0123456789abcdefghijklmn"},
        admin=True,
    ),
    ("POST", "/flush_cache"): Operation(
        tag="Control",
        summary="Forget every cached prefix that no running request uses. Needs an admin key.",
        answer="What each scheduler said.",
        admin=True,
    ),
    ("POST", "/pause_generation"): Operation(
        tag="Control",
        summary="Stop generating until told to go on; requests are kept. Needs an admin key.",
        answer="What each scheduler said.",
        admin=True,
    ),
    ("POST", "/continue_generation"): Operation(
        tag="Control", summary="End a pause. Needs an admin key.", answer="What each scheduler said.", admin=True
    ),
    ("POST", "/update_weights_from_disk"): Operation(
        tag="Control",
        summary="Go on with other weights of a model, once requests that have begun are answered. Needs an admin key.",
        answer="The fingerprint of each scheduler's weights.",
        body=UpdateWeights,
        example={"model_path": "/checkpoints/step-700"},
        admin=True,
    ),
    **{("POST", path): _LOAD for path in LOAD_PATHS},
    **{("POST", path): _UNLOAD for path in UNLOAD_PATHS},
    ("GET", "/server_info"): Operation(
        tag="Operation", summary="Models, limits, and every part with how busy it is.", answer="All of it."
    ),
    ("GET", "/health"): Operation(
        tag="Operation", summary="Whether requests can be served now. Needs no key.", answer="They can."
    ),
    ("GET", "/live"): Operation(
        tag="Operation", summary="Whether this process answers at all. Needs no key.", answer="It does."
    ),
    ("GET", "/metrics"): Operation(
        tag="Operation",
        summary="Counters for Prometheus.",
        answer="Prometheus' text format.",
        media_type="text/plain",
    ),
    ("GET", "/openapi.json"): Operation(
        tag="Operation", summary="This description.", answer="An OpenAPI 3.1 document."
    ),
}
