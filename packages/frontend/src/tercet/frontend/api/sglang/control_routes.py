"""SGLang's control endpoints: abort, cache flush, pause and weight updates."""

from typing import Annotated, Literal

from pydantic import Field, model_validator
from starlette.requests import Request
from starlette.responses import Response

from tercet.frontend.api.openai.sampling_schema import Name, Strict
from tercet.frontend.config.validation import LONGEST_PATH
from tercet.frontend.errors import BadRequestError, UnavailableError
from tercet.frontend.http.auth import require_admin
from tercet.frontend.http.json_response import json_response
from tercet.frontend.http.request_body import read_model
from tercet.frontend.http.route import Route
from tercet.frontend.manager.tokenizer_manager import TokenizerManager
from tercet.frontend.routing.control import Order
from tercet.protocol.messages.messages import ContinueGenerationReq, FlushCacheReq, PauseGenerationReq

_PREFIXES = ("chatcmpl-", "cmpl-", "msg_", "resp_", "rerank-", "score-", "classify-")
"""Prefixes of ids in responses, in front of the request id."""


class AbortRequest(Strict):
    """Request to abort: one by its id, or all of this server."""

    rid: Annotated[str, Field(min_length=1, max_length=512)] | None = None
    abort_all: bool | None = None

    @model_validator(mode="after")
    def _check_target(self) -> "AbortRequest":
        if (self.rid is None) == (not self.abort_all):
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


class ControlRoutes:
    """Endpoints that control requests and schedulers. Actions that affect all callers need an admin key."""

    def __init__(self, manager: TokenizerManager, body_limit: int) -> None:
        self._manager = manager
        self._body_limit = body_limit

    @property
    def routes(self) -> list[Route]:
        return [
            Route("POST", "/abort_request", self.abort_request),
            Route("POST", "/flush_cache", self.flush_cache),
            Route("POST", "/pause_generation", self.pause_generation),
            Route("POST", "/continue_generation", self.continue_generation),
            Route("POST", "/update_weights_from_disk", self.update_weights),
        ]

    async def abort_request(self, request: Request) -> Response:
        """Abort a request on any frontend. Ids are unguessable, so a caller that knows one is entitled to it.

        An unknown id, or one of a finished request, is no error.
        """
        body = await read_model(request, AbortRequest, self._body_limit)
        if body.abort_all:
            require_admin(request)
            self._manager.requests.abort_all()
        else:
            assert body.rid is not None
            rid = body.rid.removeprefix(next(filter(body.rid.startswith, _PREFIXES), ""))
            if not rid:
                raise BadRequestError("'rid' must be the id of a request.", param="rid")
            self._manager.requests.abort(rid)
        return json_response({"success": True})

    async def flush_cache(self, request: Request) -> Response:
        """Drop all cached prefixes that running requests do not use."""
        return await self._send_control(request, lambda number: FlushCacheReq(id=number))

    async def pause_generation(self, request: Request) -> Response:
        """Pause generation. Requests are kept, and new ones are queued."""
        return await self._send_control(request, lambda number: PauseGenerationReq(id=number))

    async def continue_generation(self, request: Request) -> Response:
        """Resume generation."""
        return await self._send_control(request, lambda number: ContinueGenerationReq(id=number))

    async def update_weights(self, request: Request) -> Response:
        """Replace the weights of all schedulers."""
        require_admin(request)
        body = await read_model(request, UpdateWeights, self._body_limit)
        if not body.model_path.startswith("/"):
            raise BadRequestError("'model_path' must be an absolute path.", param="model_path")
        if body.abort_all_requests:
            self._manager.requests.abort_all()
        weights = await self._manager.weights.update(body.model_path, body.model, rolling=bool(body.rolling))
        return json_response(
            {"success": True, "message": f"The weights are those of {body.model_path}.", "weights": weights}
        )

    async def _send_control(self, request: Request, message_for: Order) -> Response:
        """Send a control message to all schedulers and return their replies. Raises UnavailableError if one refuses."""
        require_admin(request)
        acknowledgements = await self._manager.control.broadcast(message_for)
        accepted = all(acknowledgement.ok for acknowledgement in acknowledgements.values())
        replies = {
            peer: acknowledgement.message or ("done" if acknowledgement.ok else "refused")
            for peer, acknowledgement in acknowledgements.items()
        }
        if not accepted:
            details = ", ".join(f"{peer}: {what}" for peer, what in sorted(replies.items()))
            raise UnavailableError(f"Not every scheduler obeyed. {details}.", retry_after=1)
        return json_response({"success": True, "schedulers": replies})
