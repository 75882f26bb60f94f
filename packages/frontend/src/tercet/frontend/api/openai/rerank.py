"""The /v1/rerank endpoint in Jina's format, and /v1/score in vLLM's.

A cross-encoder scores both texts at once; for an embedding model the score is the similarity of their vectors.
"""

import asyncio
import math
import time
from collections.abc import Mapping, Sequence

from starlette.requests import Request
from starlette.responses import Response

from tercet.frontend.api.openai.embedding_schema import RerankRequest, ScoreRequest
from tercet.frontend.api.openai.embeddings import json_response, model_for_task, usage
from tercet.frontend.errors import BadRequestError
from tercet.frontend.http.request_body import read_model
from tercet.frontend.http.route import Route
from tercet.frontend.http.sse import cancel_on_disconnect
from tercet.frontend.manager.embedding_state import EmbeddingBatch, unpack_vector
from tercet.frontend.manager.tokenizer_manager import TokenizerManager
from tercet.frontend.model.embedding_request import PairInput, TextInput
from tercet.frontend.model.sentence_files import Similarity, cosine, dot
from tercet.protocol.messages.values import Task

RERANK_PATHS = ("/v1/rerank", "/v2/rerank", "/rerank")
"""Paths of reranking; the second one is Cohere's, the third vLLM's."""
SCORE_PATHS = ("/v1/score", "/score")
"""Paths of scoring, both vLLM's."""


class OpenAIServingRerank:
    """Endpoints for cross-encoders and embedding models."""

    def __init__(self, manager: TokenizerManager, body_limit: int) -> None:
        self._manager = manager
        self._body_limit = body_limit

    @property
    def routes(self) -> list[Route]:
        return [
            *(Route("POST", path, self.rerank) for path in RERANK_PATHS),
            *(Route("POST", path, self.score) for path in SCORE_PATHS),
        ]

    async def rerank(self, request: Request) -> Response:
        """Return documents with their relevance, the most relevant first."""
        body = await read_model(request, RerankRequest, self._body_limit)
        texts = body.texts()
        pairs = [PairInput(body.query, text, "query", body.max_tokens_per_doc) for text in texts]
        params = [f"documents[{place}]" for place in range(len(texts))]
        rid = self._manager.new_id()
        scores, batch = await self._scores(request, body, pairs, params, rid)
        results = []
        for place in sorted(range(len(texts)), key=lambda place: -scores[place])[: body.top_n]:
            document = {} if body.return_documents is False else {"document": {"text": texts[place]}}
            results.append({"index": place, "relevance_score": scores[place], **document})
        head = {"id": f"rerank-{rid}", "model": body.model}
        return json_response({**head, "results": results, "usage": usage(batch)})

    async def score(self, request: Request) -> Response:
        """Return a score for each pair."""
        body = await read_model(request, ScoreRequest, self._body_limit)
        rid = self._manager.new_id()
        scores, batch = await self._scores(request, body, body.pairs(), body.params(), rid)
        data = [{"index": index, "object": "score", "score": score} for index, score in enumerate(scores)]
        head = {"id": f"score-{rid}", "object": "list", "created": int(time.time())}
        return json_response({**head, "model": body.model, "data": data, "usage": usage(batch)})

    async def _scores(
        self,
        request: Request,
        body: RerankRequest | ScoreRequest,
        pairs: Sequence[PairInput],
        params: list[str],
        rid: str,
    ) -> tuple[list[float], EmbeddingBatch]:
        """Return the score of each pair; `params` are the parameter names of the second texts."""
        model = await model_for_task(self._manager, body.model, Task.EMBED, Task.CLASSIFY)
        if model.limits.task is Task.EMBED:
            texts = _texts(pairs, params)
            embedding_request = body.request(list(texts), list(texts.values()))
            batch = await cancel_on_disconnect(request, self._manager.embed(embedding_request, rid))
            vectors = dict(zip(texts, batch.vectors, strict=True))
            return await asyncio.to_thread(_similarities, model.files.sentences.similarity, pairs, vectors), batch
        if model.limits.width != 1:
            message = f"The model {model.name!r} tells {model.limits.width} labels apart: it is no reranker."
            raise BadRequestError(message, param="model")
        embedding_request = body.request(list(pairs), params)
        batch = await cancel_on_disconnect(request, self._manager.embed(embedding_request, rid))
        scores = [score for vector in batch.vectors for score in unpack_vector(vector)]
        if body.use_activation is False:
            return scores, batch
        return [share for score in scores for share in model.files.sentences.activate([score])], batch


def normalized(vector: bytes) -> list[float]:
    """Return a vector normalized to length 1; zeros are unchanged."""
    given = unpack_vector(vector)
    length = math.hypot(*given)
    return [number / length for number in given] if length else list(given)


def _similarities(
    similarity: Similarity, pairs: Sequence[PairInput], vectors: Mapping[TextInput, bytes]
) -> list[float]:
    """Return the similarity of the vectors of each pair. Cosines are dot products of unit vectors."""
    read = normalized if similarity is cosine else unpack_vector
    compare = dot if similarity is cosine else similarity
    read_vectors = {text: read(vector) for text, vector in vectors.items()}
    return [compare(*(read_vectors[text] for text in _sides(pair))) for pair in pairs]


def _texts(pairs: Sequence[PairInput], params: Sequence[str]) -> dict[TextInput, str]:
    """Return the distinct texts, each with its first parameter name."""
    texts: dict[TextInput, str] = {}
    for pair, param in zip(pairs, params, strict=True):
        first, second = _sides(pair)
        texts.setdefault(first, pair.first_param)
        texts.setdefault(second, param)
    return texts


def _sides(pair: PairInput) -> tuple[TextInput, TextInput]:
    """Return the two texts of a pair as separate inputs."""
    return TextInput(pair.first), TextInput(pair.second, pair.most)
