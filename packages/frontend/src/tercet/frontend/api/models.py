"""The /v1/models endpoint, in OpenAI's format, or in Anthropic's for its clients."""

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from tercet.frontend.errors import BadRequestError
from tercet.frontend.http.error_format import uses_anthropic_format
from tercet.frontend.http.json_response import json_response
from tercet.frontend.http.query import number
from tercet.frontend.http.route import Route
from tercet.frontend.lora.registry import AdapterRegistry
from tercet.frontend.model.served_model import ServedModel
from tercet.frontend.routing.model_registry import ModelRegistry


class OpenAIServingModels:
    """Endpoint that lists the models of this frontend, then their adapters."""

    def __init__(self, models: ModelRegistry, adapters: AdapterRegistry) -> None:
        self._models = models
        self._adapters = adapters

    @property
    def routes(self) -> Sequence[Route]:
        return [
            Route("GET", "/v1/models", self.list),
            Route("GET", "/v1/models/{model:path}", self.retrieve),
        ]

    async def list(self, request: Request) -> Response:
        models = [*self._models, *await self._adapters.served()]
        if uses_anthropic_format(request.scope):
            return json_response(model_page(models, request))
        return json_response({"object": "list", "data": [_card(model) for model in models]})

    async def retrieve(self, request: Request) -> Response:
        """Return one model. Its name may contain slashes."""
        model = await self._adapters.model(request.path_params["model"])
        return json_response(model_info(model) if uses_anthropic_format(request.scope) else _card(model))


def _card(model: ServedModel) -> dict[str, Any]:
    """Return OpenAI's four fields, the context length under vLLM's name, and for an adapter its path and base model."""
    card = {
        "id": model.name,
        "object": "model",
        "created": model.created,
        "owned_by": "tercet",
        "max_model_len": model.context,
    }
    return card if model.lora is None else {**card, "root": model.lora.path, "parent": model.base}


_MAX_PAGE = 1000
"""Maximum, and default, number of models on a page, so that one request returns all."""


def model_info(model: ServedModel) -> dict[str, Any]:
    """Return a model in Anthropic's format."""
    return {
        "type": "model",
        "id": model.name,
        "display_name": model.name,
        "created_at": datetime.fromtimestamp(model.created, UTC).isoformat().replace("+00:00", "Z"),
        "lifecycle": "active",
        "line": None,
        "capabilities": None,
        "deprecated_at": None,
        "retires_at": None,
        "max_input_tokens": model.context,
        "max_tokens": model.context,
    }


def model_page(models: Sequence[ServedModel], request: Request) -> dict[str, Any]:
    """Return the page of models that the query asks for, in Anthropic's format. Raises BadRequestError."""
    limit = number(request, "limit", _MAX_PAGE, lowest=1, highest=_MAX_PAGE)
    places = {model.name: place for place, model in enumerate(models)}
    after, before = (_place(request, name, places) for name in ("after_id", "before_id"))
    if before is not None:
        begin, end = max(0, before - limit), before
        more = begin > 0
    else:
        begin = 0 if after is None else after + 1
        end = begin + limit
        more = end < len(models)
    data = [model_info(model) for model in models[begin:end]]
    return {
        "data": data,
        "has_more": more,
        "first_id": data[0]["id"] if data else None,
        "last_id": data[-1]["id"] if data else None,
    }


def _place(request: Request, name: str, places: dict[str, int]) -> int | None:
    """Return the index of the model that a cursor names."""
    cursor = request.query_params.get(name)
    if cursor is not None and cursor not in places:
        raise BadRequestError(f"There is no model {cursor!r}.", param=name, code="invalid_value")
    return None if cursor is None else places[cursor]
