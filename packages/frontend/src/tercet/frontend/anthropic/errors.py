"""Errors in Anthropic's words."""

import orjson

from tercet.frontend.errors import ApiError

ANTHROPIC_ROUTES = "/v1/messages"
"""Routes that begin so answer in these words."""
_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


def anthropic_error(error: ApiError, request_id: str) -> bytes:
    """The JSON of an error, also as the data of an event in the middle of a stream."""
    kind = _TYPES.get(error.status, "api_error" if error.status >= 500 else "invalid_request_error")
    told = f"{error.param}: {error.message}" if error.param else error.message
    return orjson.dumps({"type": "error", "error": {"type": kind, "message": told}, "request_id": request_id})
