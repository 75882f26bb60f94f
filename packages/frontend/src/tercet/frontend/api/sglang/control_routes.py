"""SGLang's control endpoints: abort, cache flush, pause and weight updates."""

import gc
from typing import Annotated, Literal

from pydantic import Field, model_validator
from starlette.requests import Request
from starlette.responses import Response

from tercet.frontend.api.openai.sampling_schema import UNSUPPORTED, Name, Strict, Unsupported
from tercet.frontend.api.sglang.client_ids import ClientIds
from tercet.frontend.config.validation import LONGEST_PATH
from tercet.frontend.errors import BadRequestError, UnavailableError
from tercet.frontend.http.auth import caller_of, require_admin
from tercet.frontend.http.json_response import json_response
from tercet.frontend.http.request_body import read_model
from tercet.frontend.http.route import Route
from tercet.frontend.manager.tokenizer_manager import TokenizerManager
from tercet.frontend.routing.control import Control, Order
from tercet.protocol.messages.messages import ContinueGenerationReq, FlushCacheReq, PauseGenerationReq

_PREFIXES = ("chatcmpl-", "cmpl-", "msg_", "resp_", "rerank-", "score-", "classify-")
"""Prefixes of ids in responses, in front of the request id."""


class AbortRequest(Strict):
    """Request to abort: one by its id, or all of this server."""

    rid: Annotated[str, Field(max_length=512)] | None = None
    """Clients of SGLang send an empty one beside `abort_all`."""
    abort_all: bool | None = None

    @model_validator(mode="after")
    def _check_target(self) -> "AbortRequest":
        if bool(self.rid) == bool(self.abort_all):
            raise BadRequestError("Give either 'rid' or 'abort_all'.", param="rid")
        return self


class UpdateWeights(Strict):
    """New weights of a model: a directory of safetensors that the schedulers can read."""

    model_path: Annotated[str, Field(min_length=1, max_length=LONGEST_PATH)]
    model: Name | None = None
    rolling: bool | None = None
    abort_all_requests: bool | None = None
    load_format: Literal["auto", "safetensors"] | None = None
    flush_cache: Literal[True] | None = None
    torch_empty_cache: bool | None = None
    token_step: Annotated[int, Field(ge=0, le=2**63 - 1)] | None = None
    weight_version: Name | None = None
    is_async: Annotated[bool | None, UNSUPPORTED] = None
    keep_pause: Annotated[bool | None, UNSUPPORTED] = None
    recapture_cuda_graph: Annotated[bool | None, UNSUPPORTED] = None
    manifest: Unsupported = None


class UpdateWeightVersion(Strict):
    """Name for the weights that are served."""

    new_version: Annotated[str, Field(min_length=1, max_length=512)]
    abort_all_requests: bool | None = None


class CheckWeights(Strict):
    """Check of weights. SGLang's other actions compare tensors in memory."""

    action: Literal["checksum"] | None = None
    allow_quant_error: Annotated[bool | None, UNSUPPORTED] = None
    skip_tensor_list: Annotated[list[Name], Field(max_length=1024), UNSUPPORTED] | None = None
    selector: Literal["target", "all"] | None = None


class PauseGeneration(Strict):
    """Treatment of running requests: `abort` ends them; `in_place` and `retract` keep them, as without a mode."""

    mode: Literal["abort", "in_place", "retract"] | None = None


class ContinueGeneration(Strict):
    """SGLang's field, which has no effect."""

    torch_empty_cache: bool | None = None


class ControlRoutes:
    """Endpoints that control requests and schedulers. Actions that affect all callers need an admin key."""

    def __init__(self, manager: TokenizerManager, ids: ClientIds, body_limit: int) -> None:
        self._manager = manager
        self._ids = ids
        self._body_limit = body_limit

    @property
    def routes(self) -> list[Route]:
        return [
            Route("POST", "/abort_request", self.abort_request),
            *(Route(method, "/flush_cache", self.flush_cache) for method in ("GET", "POST")),
            Route("POST", "/pause_generation", self.pause_generation),
            Route("POST", "/continue_generation", self.continue_generation),
            Route("POST", "/update_weights_from_disk", self.update_weights),
            Route("POST", "/update_weight_version", self.update_weight_version),
            Route("POST", "/weights_checker", self.check_weights),
            *(Route(method, "/freeze_gc", self.freeze_gc) for method in ("GET", "POST")),
        ]

    async def abort_request(self, request: Request) -> Response:
        """Abort a request on any frontend. Ids are unguessable, so a caller that knows one is entitled to it.

        An unknown id, or one of a finished request, is no error.
        """
        body = await read_model(request, AbortRequest, self._body_limit)
        if body.rid:
            self._manager.requests.abort(self._ids.find(caller_of(request).owner, body.rid) or _rid_of(body.rid))
        else:
            require_admin(request)
            self._manager.requests.abort_all()
        return json_response({"success": True})

    async def flush_cache(self, request: Request) -> Response:
        """Drop all cached prefixes that running requests do not use."""
        require_admin(request)
        return await send_control(self._manager.control, lambda number: FlushCacheReq(id=number))

    async def pause_generation(self, request: Request) -> Response:
        """Pause generation. Requests are kept unless the mode is `abort`, and new ones are queued."""
        require_admin(request)
        body = await read_model(request, PauseGeneration, self._body_limit, optional=True)
        if body.mode == "abort":
            self._manager.requests.abort_all()
        return await send_control(self._manager.control, lambda number: PauseGenerationReq(id=number))

    async def continue_generation(self, request: Request) -> Response:
        """Resume generation."""
        require_admin(request)
        await read_model(request, ContinueGeneration, self._body_limit, optional=True)
        return await send_control(self._manager.control, lambda number: ContinueGenerationReq(id=number))

    async def update_weights(self, request: Request) -> Response:
        """Replace the weights of all schedulers."""
        require_admin(request)
        body = await read_model(request, UpdateWeights, self._body_limit)
        if not body.model_path.startswith("/"):
            raise BadRequestError("'model_path' must be an absolute path.", param="model_path")
        if body.abort_all_requests:
            self._manager.requests.abort_all()
        weights = await self._manager.weights.update(
            body.model_path, body.model, rolling=bool(body.rolling), version=body.weight_version or ""
        )
        return json_response(
            {"success": True, "message": f"The weights are those of {body.model_path}.", "weights": weights}
        )

    async def update_weight_version(self, request: Request) -> Response:
        """Give the present weights a name, which this frontend reports as their version."""
        require_admin(request)
        body = await read_model(request, UpdateWeightVersion, self._body_limit)
        if body.abort_all_requests:
            self._manager.requests.abort_all()
        self._manager.weights.name_versions(body.new_version)
        message = f"The weights have the version {body.new_version}."
        return json_response({"success": True, "message": message, "new_version": body.new_version})

    async def check_weights(self, request: Request) -> Response:
        """Return the fingerprint of each scheduler's weights. Equal ones mean equal weights."""
        require_admin(request)
        await read_model(request, CheckWeights, self._body_limit, optional=True)
        return json_response({"success": True, "message": "", "weights": self._manager.weights.fingerprints()})

    async def freeze_gc(self, request: Request) -> Response:
        """Exclude the present objects of this frontend from garbage collections, which delay every stream."""
        require_admin(request)
        gc.collect()
        gc.freeze()
        return json_response({"success": True})


async def send_control(
    control: Control, message_for: Order, seconds: float | None = None, *, conflicts: bool = False
) -> Response:
    """Send a control message to all schedulers and return their replies.

    Raises UnavailableError if one refuses, or BadRequestError if it `conflicts` with an earlier message.
    """
    acknowledgements = await control.broadcast(message_for, seconds=seconds)
    replies = {
        peer: acknowledgement.message or ("done" if acknowledgement.ok else "refused")
        for peer, acknowledgement in acknowledgements.items()
    }
    if not all(acknowledgement.ok for acknowledgement in acknowledgements.values()):
        details = ", ".join(f"{peer}: {what}" for peer, what in sorted(replies.items()))
        text = f"A scheduler refused the request or did not answer. {details}."
        raise BadRequestError(text) if conflicts else UnavailableError(text, retry_after=1)
    return json_response({"success": True, "schedulers": replies})


def _rid_of(response_id: str) -> str:
    """Return the request id within the id of a response. Raises BadRequestError."""
    rid = response_id.removeprefix(next(filter(response_id.startswith, _PREFIXES), ""))
    if not rid:
        raise BadRequestError("'rid' must be the id of a request.", param="rid")
    return rid
