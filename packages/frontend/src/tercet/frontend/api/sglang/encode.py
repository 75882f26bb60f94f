"""SGLang's /encode and /classify endpoints: the vector, or the scores, of each input."""

import asyncio
from typing import Annotated, Any

import orjson
from pydantic import Field, model_validator
from starlette.requests import Request
from starlette.responses import Response

from tercet.frontend.api.openai.embedding_schema import (
    Batch,
    ClassifyRequest,
    Inputs,
    Text,
    Texts,
    TokenIds,
    Truncation,
    inputs_of,
)
from tercet.frontend.api.openai.embeddings import check_dimensions, classes, model_for_task, truncate_vector
from tercet.frontend.api.openai.sampling_schema import UNSUPPORTED, Name, Unsupported
from tercet.frontend.api.sglang.generate_schema import NativeInputs
from tercet.frontend.errors import BadRequestError
from tercet.frontend.http.request_body import read_model
from tercet.frontend.http.route import Route
from tercet.frontend.http.sse import cancel_on_disconnect
from tercet.frontend.manager.embedding_state import EmbeddingBatch, unpack_vector
from tercet.frontend.manager.tokenizer_manager import TokenizerManager
from tercet.frontend.model.embedding_request import EmbeddingRequest
from tercet.protocol.messages.values import Task


class NativeEncode(NativeInputs):
    """Request of /encode: one or several inputs, as text or as token ids."""

    text: Text | Texts | None = None
    input_ids: TokenIds | Annotated[list[TokenIds], Batch] | None = None
    model: Name | None = None
    dimensions: Annotated[int, Field(ge=1, le=2**31 - 1)] | None = None
    priority: Annotated[int, Field(ge=-(2**31), le=2**31 - 1)] | None = None
    sampling_params: Any = None
    log_metrics: bool | None = None
    rid: Unsupported = None
    image_data: Unsupported = None
    video_data: Unsupported = None
    audio_data: Unsupported = None
    lora_path: Unsupported = None
    return_prompt_token_ids: Annotated[bool | None, UNSUPPORTED] = None

    @model_validator(mode="after")
    def _check_inputs(self) -> "NativeEncode":
        self._require_one_form()
        return self

    def to_request(self, model: str) -> EmbeddingRequest:
        param, given = ("text", self.text) if self.text is not None else ("input_ids", self.input_ids)
        assert given is not None
        inputs = inputs_of(given)
        params = [f"{param}[{place}]" for place in range(len(inputs))] if self.is_batch else [param]
        return EmbeddingRequest(model=model, inputs=inputs, params=params, priority=self.priority or 0)


class NativeClassify(NativeEncode):
    """Request of /classify: SGLang's, or with `input` that of /v1/classify, which vLLM has under this path."""

    input: Inputs | None = None
    user: Name | None = None
    prompt_name: Name | None = None
    truncate_prompt_tokens: Truncation | None = None
    use_activation: bool | None = None

    def _require_one_form(self) -> None:
        if self.input is None:
            super()._require_one_form()
            return
        if self.text is not None or self.input_ids is not None:
            raise BadRequestError("Give only one of 'text', 'input_ids' and 'input'.", param="input")
        if self.model is None:
            raise BadRequestError("'model' goes with 'input'.", param="model")

    def to_classify_request(self) -> ClassifyRequest:
        """Return the request of /v1/classify with the same fields, which are not validated again."""
        return ClassifyRequest.model_construct(**{name: getattr(self, name) for name in ClassifyRequest.model_fields})


class EncodeRoutes:
    """Endpoints for embedding models, classifiers and reward models."""

    def __init__(self, manager: TokenizerManager, body_limit: int) -> None:
        self._manager = manager
        self._body_limit = body_limit

    @property
    def routes(self) -> list[Route]:
        return [Route("POST", "/encode", self.encode), Route("POST", "/classify", self.classify)]

    async def encode(self, request: Request) -> Response:
        """Return the vector of each input."""
        body = await read_model(request, NativeEncode, self._body_limit)
        return await self._vectors(request, body, Task.EMBED, Task.CLASSIFY)

    async def classify(self, request: Request) -> Response:
        """Return the scores of each input, as a classifier or reward model makes them."""
        body = await read_model(request, NativeClassify, self._body_limit)
        if body.input is not None:
            return await classes(request, self._manager, body.to_classify_request())
        return await self._vectors(request, body, Task.CLASSIFY)

    async def _vectors(self, request: Request, body: NativeEncode, *tasks: Task) -> Response:
        name = (await self._manager.adapters.model_or_first(body.model)).name
        model = await model_for_task(self._manager, name, *tasks)
        check_dimensions(body.dimensions, model)
        rid = self._manager.new_id()
        batch = await cancel_on_disconnect(request, self._manager.embed(body.to_request(name), rid))
        return Response(await asyncio.to_thread(_written, body, batch, rid), media_type="application/json")


def _written(body: NativeEncode, batch: EmbeddingBatch, rid: str) -> bytes:
    """Return the response body, serialized vector by vector."""
    rows = []
    for state in batch.states:
        kept = unpack_vector(truncate_vector(state.vector, body.dimensions))
        rows.append(orjson.dumps({"embedding": kept, "meta_info": {"id": rid, "prompt_tokens": state.prompt_tokens}}))
    return b"[" + b",".join(rows) + b"]" if body.is_batch else rows[0]
