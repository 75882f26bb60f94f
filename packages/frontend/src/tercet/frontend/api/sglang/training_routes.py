"""SGLang's endpoints for training loops: memory that trainer and server share, and weights in messages."""

import asyncio
import base64
import binascii
from collections.abc import Sequence

from starlette.requests import Request
from starlette.responses import Response

from tercet.frontend.api.sglang.control_routes import send_control
from tercet.frontend.api.sglang.training_schema import (
    DestroyWeightsUpdateGroup,
    GetWeightsByName,
    InitWeightsUpdateGroup,
    MemoryOccupation,
    UpdateWeightsFromDistributed,
    UpdateWeightsFromTensor,
    WeightPart,
)
from tercet.frontend.errors import BadRequestError
from tercet.frontend.http.auth import require_admin
from tercet.frontend.http.json_response import json_response
from tercet.frontend.http.request_body import read_model
from tercet.frontend.http.route import Route
from tercet.frontend.manager.tokenizer_manager import TokenizerManager
from tercet.frontend.routing.control import Order
from tercet.frontend.routing.weight_updates import UPDATE_TIMEOUT, PartOrder
from tercet.protocol.messages.codec import Frame
from tercet.protocol.messages.messages import ReleaseMemoryReq, ResumeMemoryReq
from tercet.protocol.messages.weight_transfers import (
    DestroyWeightsUpdateGroupReq,
    GetWeightsByNameReq,
    InitWeightsUpdateGroupReq,
    UpdateWeightsFromDistributedReq,
    UpdateWeightsFromTensorReq,
)


class TrainingRoutes:
    """Endpoints of training loops. All need an admin key."""

    def __init__(self, manager: TokenizerManager, body_limit: int) -> None:
        self._manager = manager
        self._body_limit = body_limit

    @property
    def routes(self) -> list[Route]:
        both = ("GET", "POST")
        return [
            *(Route(method, "/release_memory_occupation", self.release_memory) for method in both),
            *(Route(method, "/resume_memory_occupation", self.resume_memory) for method in both),
            Route("POST", "/update_weights_from_tensor", self.update_from_tensor),
            Route("POST", "/update_weights_from_distributed", self.update_from_distributed),
            Route("POST", "/init_weights_update_group", self.init_group),
            Route("POST", "/destroy_weights_update_group", self.destroy_group),
            *(Route(method, "/get_weights_by_name", self.get_weights) for method in both),
        ]

    async def release_memory(self, request: Request) -> Response:
        """Give the memory of all schedulers back to the system. Requests are kept until it is resumed."""
        require_admin(request)
        body = await read_model(request, MemoryOccupation, self._body_limit, optional=True)
        return await self._send(lambda number: ReleaseMemoryReq(id=number, tags=body.memory))

    async def resume_memory(self, request: Request) -> Response:
        """Allocate released memory again, and load the weights again."""
        require_admin(request)
        body = await read_model(request, MemoryOccupation, self._body_limit, optional=True)
        return await self._send(lambda number: ResumeMemoryReq(id=number, tags=body.memory))

    async def update_from_tensor(self, request: Request) -> Response:
        """Replace tensors of the served weights by those in the body."""
        require_admin(request)
        body = await read_model(request, UpdateWeightsFromTensor, self._body_limit)
        files = await asyncio.to_thread(_decoded, body.serialized_named_tensors)
        return await self._transfer(
            lambda number, part, last: UpdateWeightsFromTensorReq(id=number, part=part, last=last), body, files
        )

    async def update_from_distributed(self, request: Request) -> Response:
        """Replace tensors of the served weights by those that the trainer broadcasts now."""
        require_admin(request)
        body = await read_model(request, UpdateWeightsFromDistributed, self._body_limit)
        return await self._transfer(
            lambda number, part, last: UpdateWeightsFromDistributedReq(
                id=number,
                part=part,
                last=last,
                group=body.group_name,
                names=body.names,
                dtypes=list(body.dtypes),
                shapes=body.shapes,
            ),
            body,
        )

    async def init_group(self, request: Request) -> Response:
        """Let all schedulers of a model join a trainer's process group."""
        require_admin(request)
        body = await read_model(request, InitWeightsUpdateGroup, self._body_limit)

        def message_for(number: str, peers: Sequence[str]) -> InitWeightsUpdateGroupReq:
            return InitWeightsUpdateGroupReq(
                id=number,
                group=body.group_name,
                address=body.master_address,
                port=body.master_port,
                world_size=body.world_size,
                ranks={peer: rank for rank, peer in enumerate(sorted(peers), body.rank_offset)},
                backend=body.backend,
            )

        await self._manager.weights.ask(message_for, body.model)
        return json_response({"success": True, "message": f"Every scheduler has joined {body.group_name}."})

    async def destroy_group(self, request: Request) -> Response:
        """Let all schedulers of a model leave a process group."""
        require_admin(request)
        body = await read_model(request, DestroyWeightsUpdateGroup, self._body_limit, optional=True)
        await self._manager.weights.ask(
            lambda number, _: DestroyWeightsUpdateGroupReq(id=number, group=body.group_name), body.model
        )
        return json_response({"success": True, "message": f"Every scheduler has left {body.group_name}."})

    async def get_weights(self, request: Request) -> Response:
        """Return the first rows of a tensor of the served weights, as a scheduler reads it from their files."""
        require_admin(request)
        body = await read_model(request, GetWeightsByName, self._body_limit)
        values = await self._manager.weights.ask(
            lambda number, _: GetWeightsByNameReq(id=number, name=body.name, rows=body.truncate_size), body.model
        )
        return Response(next(iter(values.values())), media_type="application/json")

    async def _send(self, message_for: Order) -> Response:
        return await send_control(self._manager.control, message_for, UPDATE_TIMEOUT)

    async def _transfer(self, order: PartOrder, body: WeightPart, files: Sequence[Frame] = ()) -> Response:
        if body.abort_all_requests:
            self._manager.requests.abort_all()
        weights = await self._manager.weights.transfer(
            order, body.model, frames=files, last=body.last, version=body.weight_version or ""
        )
        message = "The weights are updated." if body.last else "The tensors are kept for the last part of the update."
        return json_response({"success": True, "message": message, "weights": weights})


def _decoded(encoded: Sequence[str]) -> list[bytes]:
    """Return safetensors files from base64. Raises BadRequestError for anything else, such as a pickle."""
    try:
        files = [base64.b64decode(text, validate=True) for text in encoded]
    except (binascii.Error, ValueError):
        files = [b""]
    if any(file[8:9] != b"{" for file in files):
        message = "'serialized_named_tensors' must be safetensors files in base64; pickles are never read."
        raise BadRequestError(message, param="serialized_named_tensors")
    return files
