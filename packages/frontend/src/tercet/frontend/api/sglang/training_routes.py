"""SGLang's endpoints for training loops that share memory with the server."""

from typing import Annotated, Literal

from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from tercet.frontend.api.openai.sampling_schema import Strict
from tercet.frontend.api.sglang.control_routes import send_control
from tercet.frontend.http.auth import require_admin
from tercet.frontend.http.request_body import read_model
from tercet.frontend.http.route import Route
from tercet.frontend.manager.tokenizer_manager import TokenizerManager
from tercet.frontend.routing.control import Order
from tercet.frontend.routing.weight_updates import UPDATE_TIMEOUT
from tercet.protocol.messages.messages import ReleaseMemoryReq, ResumeMemoryReq
from tercet.protocol.messages.values import MemoryTag


class MemoryOccupation(Strict):
    """Memory to release or to resume. CUDA graphs go and come with the rest."""

    tags: Annotated[list[Literal["weights", "kv_cache", "cuda_graph"]], Field(max_length=16)] | None = None

    @property
    def memory(self) -> list[MemoryTag]:
        return [tag for tag in MemoryTag if not self.tags or tag in self.tags]


class TrainingRoutes:
    """Endpoints of training loops. All need an admin key."""

    def __init__(self, manager: TokenizerManager, body_limit: int) -> None:
        self._manager = manager
        self._body_limit = body_limit

    @property
    def routes(self) -> list[Route]:
        return [
            *(Route(method, "/release_memory_occupation", self.release_memory) for method in ("GET", "POST")),
            *(Route(method, "/resume_memory_occupation", self.resume_memory) for method in ("GET", "POST")),
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

    async def _send(self, message_for: Order) -> Response:
        return await send_control(self._manager.control, message_for, UPDATE_TIMEOUT)
