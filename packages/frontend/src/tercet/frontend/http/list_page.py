"""Pages of lists, in OpenAI's form."""

from collections.abc import Sequence
from typing import Any

import msgspec
from starlette.requests import Request

from tercet.frontend.errors import BadRequestError
from tercet.frontend.http.query import number, order


class PageQuery(msgspec.Struct, frozen=True):
    """Position and length of a page. `after` is the id of the last entry of the previous page."""

    limit: int
    after: str | None
    order: str


def page_query(request: Request, default_order: str = "desc") -> PageQuery:
    """Return the page that a request asks for. Raises BadRequestError."""
    limit = number(request, "limit", 20, lowest=1, highest=100)
    return PageQuery(limit, request.query_params.get("after"), order(request, default_order))


def listed(entries: Sequence[tuple[str, Any]], *, has_more: bool = False) -> dict[str, Any]:
    """Return the list object of entries, each given by its id and its object or JSON fragment."""
    return {
        "object": "list",
        "data": [entry for _, entry in entries],
        "first_id": entries[0][0] if entries else None,
        "last_id": entries[-1][0] if entries else None,
        "has_more": has_more,
    }


def unknown_after(kind: str, name: str) -> BadRequestError:
    """Return the error for an `after` that names no entry of the list."""
    return BadRequestError(f"{kind} with id '{name}' not found.", param="after", code="invalid_value")
