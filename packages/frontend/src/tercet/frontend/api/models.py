"""/v1/models: in OpenAI's words, or in Anthropic's for its clients."""

from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import Response

from tercet.frontend.api.anthropic.models import model_info, model_page
from tercet.frontend.http.error_format import asks_anthropic
from tercet.frontend.lora.registry import AdapterRegistry
from tercet.frontend.model.served_model import ServedModel
from tercet.frontend.routing.model_registry import ModelRegistry


class OpenAIServingModels:
    """Lists what this frontend has learnt to serve: models, then their adapters."""

    def __init__(self, models: ModelRegistry, adapters: AdapterRegistry) -> None:
        self._models = models
        self._adapters = adapters

    async def list(self, request: Request) -> Response:
        """Every model."""
        models = [*self._models, *await self._adapters.served()]
        if asks_anthropic(request.scope):
            return _json(model_page(models, request))
        return _json({"object": "list", "data": [_card(model) for model in models]})

    async def retrieve(self, request: Request) -> Response:
        """One model; its name may hold slashes."""
        model = await self._adapters.model(request.path_params["model"])
        return _json(model_info(model) if asks_anthropic(request.scope) else _card(model))


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


def _json(value: dict[str, Any]) -> Response:
    return Response(orjson.dumps(value), media_type="application/json")
