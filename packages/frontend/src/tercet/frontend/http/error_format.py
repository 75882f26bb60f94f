"""Errors in Anthropic's words."""

import re

import orjson
from starlette.datastructures import Headers
from starlette.types import Scope

from tercet.frontend.errors import ApiError, ContextLengthExceededError

ANTHROPIC_ROUTES = "/v1/messages"
"""Routes that begin so answer in these words."""
_ROUTES_OF_BOTH = "/v1/models"
"""Routes that begin so answer in these words where Anthropic's client asks, and else in OpenAI's."""
_INDEX = re.compile(r"\[(\d+)\]")
"""Of a list, as OpenAI writes it in the path of a field; Anthropic has a dot before it."""
_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


def asks_anthropic(scope: Scope) -> bool:
    """Whether a request is to be answered in these words: all of Anthropic's client have the header, no others do."""
    path = scope["path"]
    if path.startswith(_ROUTES_OF_BOTH):
        return "anthropic-version" in Headers(scope=scope)
    return bool(path.startswith(ANTHROPIC_ROUTES))


def anthropic_error(error: ApiError, request_id: str) -> bytes:
    """The JSON of an error, also as the data of an event in the middle of a stream."""
    kind = _TYPES.get(error.status, "api_error" if error.status >= 500 else "invalid_request_error")
    message = _words(error)
    if error.param:
        path = _INDEX.sub(r".\1", error.param)
        message = f"{path}: " + message.replace(f"'{error.param}'", f"'{path}'")
    return orjson.dumps({"type": "error", "error": {"type": kind, "message": message}, "request_id": request_id})


def _words(error: ApiError) -> str:
    """The message; of lengths in the words in which Anthropic's clients look for the numbers, to ask for less."""
    match error:
        case ContextLengthExceededError(prompt=prompt, context=context) if prompt >= context > 0:
            return f"prompt is too long: {prompt} tokens > {context} maximum"
        case ContextLengthExceededError(prompt=prompt, output=output, context=context) if context > 0:
            return (
                f"input length and `max_tokens` exceed context limit: {prompt} + {output} > {context}, "
                "decrease input length or `max_tokens` and try again"
            )
    return error.message
