"""/v1/models."""

from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import Response

from tercet.frontend.adapters import Adapters
from tercet.frontend.model_registry import ModelRegistry
from tercet.frontend.served_model import ServedModel


class OpenAIServingModels:
    """Lists what this frontend has learnt to serve: models, then their adapters."""

    def __init__(self, models: ModelRegistry, adapters: Adapters) -> None:
        self._models = models
        self._adapters = adapters

    async def list(self, request: Request) -> Response:  # noqa: ARG002
        """Every model."""
        cards = [_card(model) for model in (*self._models, *await self._adapters.served())]
        return Response(orjson.dumps({"object": "list", "data": cards}), media_type="application/json")

    async def retrieve(self, request: Request) -> Response:
        """One model; its name may hold slashes."""
        model = await self._adapters.model(request.path_params["model"])
        return Response(orjson.dumps(_card(model)), media_type="application/json")


def _card(model: ServedModel) -> dict[str, Any]:
    """OpenAI's four fields, and the length this field's clients look for; of an adapter, as others, what it is of."""
    card = {
        "id": model.name,
        "object": "model",
        "created": model.created,
        "owned_by": "tercet",
        "max_model_len": model.context,
    }
    return card if model.lora is None else {**card, "root": model.lora.path, "parent": model.base}
