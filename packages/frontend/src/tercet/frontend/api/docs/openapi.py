"""The /openapi.json endpoint: OpenAPI 3.1, generated from the request schemas."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import orjson
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from starlette.requests import Request
from starlette.responses import Response

from tercet.frontend.__about__ import __version__
from tercet.frontend.http.error_format import ANTHROPIC_ROUTES
from tercet.frontend.http.route import Route

_REF = "#/components/schemas/{model}"
_REFUSALS = {
    400: "The request is invalid; `param` names the parameter.",
    401: "The API key is missing or wrong.",
    404: "The model or object does not exist.",
    429: "Too many requests at once; try again after `Retry-After` seconds.",
    431: "The headers are too long.",
    500: "The server failed this request.",
    503: "The server cannot serve this now; try again after `Retry-After` seconds.",
}
_REFUSALS_OF_BODIES = {
    408: "The body took too long to arrive.",
    413: "The body is too long.",
    415: "The body is not JSON.",
}
_ADMIN_ONLY = {403: "The route needs an admin key."}
_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}

_ANTHROPIC_ERROR = {
    "type": "object",
    "required": ["type", "error", "request_id"],
    "properties": {
        "type": {"const": "error"},
        "error": {
            "type": "object",
            "required": ["type", "message"],
            "properties": {"type": {"type": "string"}, "message": {"type": "string"}},
        },
        "request_id": {"type": "string"},
    },
}

_TYPES = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array", dict: "object"}
MethodAndPath = tuple[str, str]


class QueryParameter(msgspec.Struct, frozen=True):
    """A parameter of the query string."""

    name: str
    schema: Mapping[str, Any]
    description: str


def page_parameters(kind: str, orders: str) -> list[QueryParameter]:
    """Return the parameters of a list. `orders` describes both orders, and which is the default."""
    return [
        QueryParameter(
            "limit", {"type": "integer", "minimum": 1, "maximum": 100}, f"{kind.capitalize()} per page; 20 by default."
        ),
        QueryParameter("after", {"type": "string"}, "Id of the last one of the previous page."),
        QueryParameter("order", {"enum": ["asc", "desc"]}, orders),
    ]


class Operation(msgspec.Struct, frozen=True, kw_only=True):
    """Documentation of one route."""

    tag: str
    summary: str
    answer: str
    """Description of the response, in a phrase."""
    response: Any
    """Example of the response."""
    body: type[BaseModel] | None = None
    example: Mapping[str, Any] = {}
    """Request body that works on a server of the embedded model. Routes with an empty example need no fields."""
    query: Sequence[QueryParameter] = ()
    lists: bool = False
    """A batch request is answered with a list."""
    form: bool = False
    """The body is multipart/form-data, not JSON."""
    streams: bool = False
    """A request with `stream: true` is answered with server-sent events."""
    admin: bool = False
    """Part or all of the route needs an admin key."""
    media_type: str = "application/json"


def document(operations: Mapping[MethodAndPath, Operation]) -> dict[str, Any]:
    """Return the OpenAPI document of all operations.

    `operations` is keyed by method and path, as the router writes them.
    """
    bodies = sorted({each.body for each in operations.values() if each.body}, key=lambda model: model.__name__)
    refs, shared = models_json_schema([(model, "validation") for model in bodies], ref_template=_REF)
    paths: dict[str, dict[str, Any]] = {}
    for (method, path), operation in operations.items():
        schema = refs[operation.body, "validation"] if operation.body else None
        plain, names = _plain(path)
        paths.setdefault(plain, {})[method.lower()] = _describe(plain, operation, schema, names)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Tercet",
            "version": __version__,
            "description": "Open language models behind the OpenAI HTTP API. Other methods of these paths are a 405.",
        },
        "security": [{"bearer": []}],
        "paths": paths,
        "components": {
            "securitySchemes": {"bearer": {"type": "http", "scheme": "bearer"}},
            "schemas": {**shared.get("$defs", {}), "Error": _ERROR, "AnthropicError": _ANTHROPIC_ERROR},
        },
    }


def _describe(
    path: str, operation: Operation, schema: Mapping[str, Any] | None, names: Sequence[str]
) -> dict[str, Any]:
    content: dict[str, Any] = {operation.media_type: {"schema": _like(operation), "example": operation.response}}
    if operation.streams:
        content["text/event-stream"] = {"schema": {"type": "string"}}
    responses: dict[str, Any] = {"200": {"description": operation.answer, "content": content}}
    words = "AnthropicError" if path.startswith(ANTHROPIC_ROUTES) else "Error"
    error = {"application/json": {"schema": {"$ref": _REF.format(model=words)}}}
    refusals = _REFUSALS | (_REFUSALS_OF_BODIES if schema else {}) | (_ADMIN_ONLY if operation.admin else {})
    for status, description in sorted(refusals.items()):
        responses[str(status)] = {"description": description, "content": error}
    described: dict[str, Any] = {"tags": [operation.tag], "summary": operation.summary, "responses": responses}
    parameters = [{"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in names]
    parameters += [
        {"name": each.name, "in": "query", "schema": dict(each.schema), "description": each.description}
        for each in operation.query
    ]
    if parameters:
        described["parameters"] = parameters
    if schema is not None:
        media = {"schema": schema, "example": operation.example}
        media_type = "multipart/form-data" if operation.form else "application/json"
        described["requestBody"] = {"required": True, "content": {media_type: media}}
    return described


def _like(operation: Operation) -> dict[str, Any]:
    """Return the schema of the outermost level of a response; deeper levels depend on the request."""
    answer = operation.response
    if not isinstance(answer, dict):
        return _type_of(answer)
    fields = {name: _type_of(value) for name, value in answer.items()}
    shape = {"type": "object", "required": list(fields), "properties": fields}
    return {"anyOf": [shape, {"type": "array", "items": shape}]} if operation.lists else shape


def _type_of(value: Any) -> dict[str, Any]:
    """Return the type of a value as nullable, or no type for null, since other responses may have a value there."""
    return {} if value is None else {"type": [_TYPES[type(value)], "null"]}


def _plain(path: str) -> tuple[str, list[str]]:
    """Return a path without the router's converters, and the names of its parameters."""
    names = re.findall(r"{(\w+)(?::\w+)?}", path)
    return re.sub(r"{(\w+):\w+}", r"{\1}", path), names


class OpenApi:
    """The endpoint, which generates the document once."""

    def __init__(self, operations: Mapping[MethodAndPath, Operation]) -> None:
        self._operations = operations
        self._body: bytes | None = None

    @property
    def routes(self) -> list[Route]:
        return [Route("GET", "/openapi.json", self.read)]

    async def read(self, request: Request) -> Response:  # noqa: ARG002
        """Return the document, generated at the first request, since most servers never get one."""
        if self._body is None:
            self._body = orjson.dumps(document(self._operations))
        return Response(self._body, media_type="application/json")
