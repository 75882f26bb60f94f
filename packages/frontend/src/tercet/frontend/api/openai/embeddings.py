"""The /v1/embeddings and /v1/classify endpoints. Each input has a result of its own."""

import asyncio
import base64
import math
import time
from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import Response

from tercet.frontend.api.openai.embedding_schema import ClassifyRequest, EmbeddingCreate
from tercet.frontend.errors import BadRequestError
from tercet.frontend.http.request_body import read_model
from tercet.frontend.http.route import Route
from tercet.frontend.http.sse import cancel_on_disconnect
from tercet.frontend.manager.embedding_state import EmbeddingBatch, unpack_vector
from tercet.frontend.manager.tokenizer_manager import TokenizerManager
from tercet.frontend.model.served_model import ServedModel
from tercet.protocol.messages.values import Task, pack_floats


class OpenAIServingEmbedding:
    """Endpoints for embedding and classification models."""

    def __init__(self, manager: TokenizerManager, body_limit: int) -> None:
        self._manager = manager
        self._body_limit = body_limit

    @property
    def routes(self) -> list[Route]:
        return [
            Route("POST", "/v1/embeddings", self.create),
            Route("POST", "/v1/classify", self.classify),
        ]

    async def create(self, request: Request) -> Response:
        """Return an embedding of each input."""
        body = await read_model(request, EmbeddingCreate, self._body_limit)
        model = await model_for_task(self._manager, body.model, Task.EMBED)
        check_dimensions(body.dimensions, model)
        batch = await cancel_on_disconnect(request, self._manager.embed(body.to_request()))
        return Response(await asyncio.to_thread(_embeddings, body, batch), media_type="application/json")

    async def classify(self, request: Request) -> Response:
        """Return the classes of each input, in vLLM's format."""
        body = await read_model(request, ClassifyRequest, self._body_limit)
        return await classes(request, self._manager, body)


async def classes(request: Request, manager: TokenizerManager, body: ClassifyRequest) -> Response:
    """Return the response of /v1/classify. Raises ApiError."""
    model = await model_for_task(manager, body.model, Task.CLASSIFY)
    rid = manager.new_id()
    batch = await cancel_on_disconnect(request, manager.embed(body.to_request(), rid))
    head = {"id": f"classify-{rid}", "object": "list", "created": int(time.time()), "model": body.model}
    return Response(await asyncio.to_thread(_classes, head, body, model, batch), media_type="application/json")


async def model_for_task(manager: TokenizerManager, name: str, *tasks: Task) -> ServedModel:
    """Return the model of a request. Raises BadRequestError for adapters and for models without one of `tasks`."""
    model = await manager.adapters.model(name)
    if model.lora is not None:
        raise BadRequestError(f"{name!r} is an adapter, and only answers that are text have one.", param="model")
    task = model.limits.task
    if task not in tasks:
        does = {Task.GENERATE: "generates text", Task.EMBED: "makes vectors", Task.CLASSIFY: "classifies"}[task]
        raise BadRequestError(f"The model {name!r} {does}, and cannot answer this.", param="model")
    return model


def check_dimensions(dimensions: int | None, model: ServedModel) -> None:
    """Raise BadRequestError for more dimensions than the vectors of a model have."""
    if dimensions is not None and dimensions > model.limits.width:
        message = f"The vectors of this model have {model.limits.width} dimensions."
        raise BadRequestError(message, param="dimensions", code="invalid_value")


def truncate_vector(vector: bytes, dimensions: int | None) -> bytes:
    """Return the first `dimensions` numbers of a vector, normalized to length 1."""
    if dimensions is None or 4 * dimensions == len(vector):
        return vector
    kept = unpack_vector(vector[: 4 * dimensions])
    length = math.hypot(*kept)
    return pack_floats(number / length for number in kept) if length else vector[: 4 * dimensions]


def usage(batch: EmbeddingBatch) -> dict[str, int]:
    """Return the token counts, which include special tokens."""
    return {"prompt_tokens": batch.tokens, "total_tokens": batch.tokens}


def json_response(body: dict[str, Any]) -> Response:
    """Return a JSON response. All numbers in `body` are finite."""
    return Response(orjson.dumps(body), media_type="application/json")


def _classes(head: dict[str, Any], body: ClassifyRequest, model: ServedModel, batch: EmbeddingBatch) -> bytes:
    """Return the response body, serialized input by input."""
    written = []
    for index, vector in enumerate(batch.vectors):
        scores = list(unpack_vector(vector))
        shares = scores if body.use_activation is False else model.files.sentences.activate(scores)
        best = max(range(len(shares)), key=shares.__getitem__)
        label = model.limits.labels[best] if best < len(model.limits.labels) else None
        row = {"index": index, "label": label, "probs": shares, "num_classes": len(shares)}
        written.append(orjson.dumps(row))
    return _with_data({**head, "usage": usage(batch)}, written)


def _with_data(head: dict[str, Any], written: list[bytes]) -> bytes:
    """Return an object that ends in the serialized list."""
    return orjson.dumps(head)[:-1] + b',"data":[' + b",".join(written) + b"]}"


def _embeddings(body: EmbeddingCreate, batch: EmbeddingBatch) -> bytes:
    """Return the response body, serialized vector by vector: millions of numbers at once would block all threads."""
    written = []
    for index, vector in enumerate(batch.vectors):
        kept = truncate_vector(vector, body.dimensions)
        embedding = base64.b64encode(kept).decode() if body.encoding_format == "base64" else unpack_vector(kept)
        written.append(orjson.dumps({"object": "embedding", "index": index, "embedding": embedding}))
    return _with_data({"object": "list", "model": body.model, "usage": usage(batch)}, written)
