"""Documentation of the routes that rank, score and classify."""

from typing import Any

from tercet.frontend.api.docs.examples import CREATED, READ, RID
from tercet.frontend.api.docs.openapi import MethodAndPath, Operation
from tercet.frontend.api.openai.embedding_schema import ClassifyRequest, RerankRequest, ScoreRequest
from tercet.frontend.api.openai.rerank import RERANK_PATHS, SCORE_PATHS

_RANKED: dict[str, Any] = {
    "id": f"rerank-{RID}",
    "model": "bge-reranker-v2-m3",
    "results": [{"index": 0, "relevance_score": 0.9, "document": {"text": "Three lines."}}],
    "usage": READ,
}
_SCORED = {
    "id": f"score-{RID}",
    "object": "list",
    "created": CREATED,
    "model": "bge-reranker-v2-m3",
    "data": [{"index": 0, "object": "score", "score": 0.9}],
    "usage": READ,
}
_CLASSIFIED = {
    "id": f"classify-{RID}",
    "object": "list",
    "created": CREATED,
    "model": "sentiment",
    "data": [{"index": 0, "label": "good", "probs": [0.1, 0.9], "num_classes": 2}],
    "usage": READ,
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

SCORES: dict[MethodAndPath, Operation] = {
    **{("POST", path): _RERANK for path in RERANK_PATHS},
    **{("POST", path): _SCORE for path in SCORE_PATHS},
    ("POST", "/v1/classify"): _CLASSIFY,
}
