"""Error responses, Anthropic's form of their bodies, and the choice between the formats of the two APIs."""

import re

import orjson
from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import Scope

from tercet.frontend.errors import ApiError, ContextLengthExceededError
from tercet.frontend.http.request_id import request_id_of

ANTHROPIC_ROUTES = "/v1/messages"
"""Prefix of the routes that answer in Anthropic's format."""
_SHARED_ROUTES = "/v1/models"
"""Prefix of the routes that answer in either format: Anthropic's for its client, else OpenAI's."""
ROUTE = "tercet.route"
"""Key of the scope for the path of the matched route, as the router writes it."""
_INDEX = re.compile(r"\[(\d+)\]")
"""A list index in OpenAI's notation for a field's path. Anthropic writes `.0` instead of `[0]`."""
_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


def uses_anthropic_format(scope: Scope) -> bool:
    """Return whether the response has Anthropic's format.

    Its client is known by a header, on shared routes and where no route matches.
    """
    path = scope["path"]
    if path.startswith(ANTHROPIC_ROUTES):
        return True
    may_be = ROUTE not in scope or path.startswith(_SHARED_ROUTES)
    return may_be and "anthropic-version" in Headers(scope=scope)


def error_response(error: ApiError, scope: Scope) -> Response:
    """Return the response for an error, in the format of the client's API."""
    body = anthropic_error(error, request_id_of(scope)) if uses_anthropic_format(scope) else error.body()
    return Response(body, error.status, error.headers(), media_type="application/json")


def anthropic_error(error: ApiError, request_id: str) -> bytes:
    """Return the JSON of an error, for a response or for an event of a stream."""
    kind = _TYPES.get(error.status, "api_error" if error.status >= 500 else "invalid_request_error")
    message = _message_of(error)
    if error.param:
        path = _INDEX.sub(r".\1", error.param)
        message = f"{path}: " + message.replace(f"'{error.param}'", f"'{path}'")
    return orjson.dumps({"type": "error", "error": {"type": kind, "message": message}, "request_id": request_id})


def _message_of(error: ApiError) -> str:
    """Return the message of an error.

    Messages about lengths follow Anthropic's wording, because its clients parse the numbers to retry with less.
    """
    match error:
        case ContextLengthExceededError(prompt=prompt, context=context) if prompt >= context > 0:
            return f"prompt is too long: {prompt} tokens > {context} maximum"
        case ContextLengthExceededError(prompt=prompt, output=output, context=context) if context > 0:
            return (
                f"input length and `max_tokens` exceed context limit: {prompt} + {output} > {context}, "
                "decrease input length or `max_tokens` and try again"
            )
    return error.message
