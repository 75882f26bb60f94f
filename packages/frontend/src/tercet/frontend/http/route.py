"""Route of the HTTP API, which an endpoint class lists in its `routes`."""

from collections.abc import Awaitable, Callable
from typing import NamedTuple

from starlette.requests import Request
from starlette.responses import Response


class Route(NamedTuple):
    """Method, path and endpoint."""

    method: str
    path: str
    endpoint: Callable[[Request], Awaitable[Response]]
