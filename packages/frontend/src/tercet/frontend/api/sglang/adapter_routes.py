"""The /load_lora_adapter and /unload_lora_adapter endpoints of SGLang, and vLLM's below /v1."""

from typing import Annotated

import orjson
from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from tercet.frontend.api.openai.sampling_schema import Name, Strict
from tercet.frontend.config.validation import LONGEST_NAME, LONGEST_PATH
from tercet.frontend.http.auth import require_admin
from tercet.frontend.http.request_body import read_model
from tercet.frontend.http.route import Route
from tercet.frontend.lora.registry import AdapterRegistry

LOAD_PATHS = ("/load_lora_adapter", "/v1/load_lora_adapter")
UNLOAD_PATHS = ("/unload_lora_adapter", "/v1/unload_lora_adapter")

AdapterName = Annotated[str, Field(min_length=1, max_length=LONGEST_NAME)]


class LoadAdapter(Strict):
    """Name and path of an adapter: a directory that the schedulers can read, or a name on Hugging Face."""

    lora_name: AdapterName
    lora_path: Annotated[str, Field(min_length=1, max_length=LONGEST_PATH)]
    base_model: Name | None = None
    pinned: bool | None = None
    load_inplace: bool | None = None


class UnloadAdapter(Strict):
    """Name of an adapter to unload."""

    lora_name: AdapterName
    lora_int_id: Annotated[int, Field(ge=0, le=2**63 - 1)] | None = None


class AdapterRoutes:
    """Endpoints that load and unload adapters. Adapters are shared by all callers, so both need an admin key."""

    def __init__(self, adapters: AdapterRegistry, body_limit: int) -> None:
        self._adapters = adapters
        self._body_limit = body_limit

    @property
    def routes(self) -> list[Route]:
        return [
            *(Route("POST", path, self.load) for path in LOAD_PATHS),
            *(Route("POST", path, self.unload) for path in UNLOAD_PATHS),
        ]

    async def load(self, request: Request) -> Response:
        """Load an adapter on all schedulers, and give it a name."""
        require_admin(request)
        body = await read_model(request, LoadAdapter, self._body_limit)
        await self._adapters.load(body.lora_name, body.lora_path, body.base_model)
        return await self._loaded()

    async def unload(self, request: Request) -> Response:
        """Remove the name of an adapter."""
        require_admin(request)
        body = await read_model(request, UnloadAdapter, self._body_limit)
        await self._adapters.unload(body.lora_name)
        return await self._loaded()

    async def _loaded(self) -> Response:
        paths = {each.name: each.lora.path for each in await self._adapters.all()}
        return Response(orjson.dumps({"success": True, "loaded_adapters": paths}), media_type="application/json")
