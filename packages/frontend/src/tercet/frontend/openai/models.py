"""/v1/models."""

from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import Response

from tercet.frontend.model_registry import ModelRegistry
from tercet.frontend.served_model import ServedModel


class OpenAIServingModels:
    """Lists what this frontend has learnt to serve."""

    def __init__(self, models: ModelRegistry) -> None:
        self._models = models

    async def list(self, request: Request) -> Response:  # noqa: ARG002
        """Every model."""
        cards = [_card(model) for model in self._models]
        return Response(orjson.dumps({"object": "list", "data": cards}), media_type="application/json")

    async def retrieve(self, request: Request) -> Response:
        """One model; its name may hold slashes."""
        model = self._models.get(request.path_params["model"])
        return Response(orjson.dumps(_card(model)), media_type="application/json")


def _card(model: ServedModel) -> dict[str, Any]:
    """OpenAI's four fields, and the length this field's clients look for."""
    return {
        "id": model.name,
        "object": "model",
        "created": model.created,
        "owned_by": "tercet",
        "max_model_len": model.context,
    }
