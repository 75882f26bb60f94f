"""Models in Anthropic's words, for requests to /v1/models that name a version of its API."""

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from starlette.requests import Request

from tercet.frontend.errors import BadRequestError
from tercet.frontend.http.query import number
from tercet.frontend.model.served_model import ServedModel

_MOST = 1000
"""Models on a page, by default, too: who asks once is to see all that there are."""


def model_info(model: ServedModel) -> dict[str, Any]:
    """One model."""
    return {
        "type": "model",
        "id": model.name,
        "display_name": model.name,
        "created_at": datetime.fromtimestamp(model.created, UTC).isoformat().replace("+00:00", "Z"),
        "lifecycle": "active",
        "max_input_tokens": model.context,
        "max_tokens": model.context,
    }


def model_page(models: Sequence[ServedModel], request: Request) -> dict[str, Any]:
    """The page of models that the request's query is for. Raises BadRequestError."""
    limit = number(request, "limit", _MOST, lowest=1, highest=_MOST)
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
    """Where the model is that a cursor names."""
    cursor = request.query_params.get(name)
    if cursor is not None and cursor not in places:
        raise BadRequestError(f"There is no model {cursor!r}.", param=name, code="invalid_value")
    return None if cursor is None else places[cursor]
