"""Errors of requests, in the format of the OpenAI API.

ApiError
├── BadRequestError 400
│   ├── UnknownParameterError
│   ├── UnsupportedParameterError
│   └── ContextLengthExceededError
├── UnauthorizedError 401
├── ForbiddenError 403
├── NotFoundError 404
│   └── ModelNotFoundError
├── MethodNotAllowedError 405
├── RequestTimeoutError 408
├── PayloadTooLargeError 413
├── UnsupportedMediaTypeError 415
├── RateLimitError 429
├── HeadersTooLongError 431
├── RequestAbortedError 499
├── ServerError 500
│   └── DeadlyRequestError
└── UnavailableError 503

Each ends a single request and has no effect on others.
"""

import orjson

_LONGEST_MESSAGE = 2048
_LONGEST_PARAM = 256
"""Maximum characters: messages and names may quote the client's text, which can be long."""


class ApiError(Exception):
    """Error in OpenAI's format; `code` is a string or null, `retry_after` is in seconds."""

    status = 500
    type = "server_error"
    code: str | None = None

    def __init__(
        self, message: str, *, param: str | None = None, code: str | None = None, retry_after: float | None = None
    ) -> None:
        message = _shortened(message, _LONGEST_MESSAGE)
        super().__init__(message)
        self.message = message
        self.param = None if param is None else _shortened(param, _LONGEST_PARAM)
        self.code = code or type(self).code
        self.retry_after = retry_after

    def body(self) -> bytes:
        """Return the JSON body, also used as the data of an event within a stream."""
        error = {"message": self.message, "type": self.type, "param": self.param, "code": self.code}
        return orjson.dumps({"error": error})

    def headers(self) -> dict[str, str]:
        """Return additional headers, such as the time to retry."""
        return {} if self.retry_after is None else {"retry-after": f"{self.retry_after:g}"}


class BadRequestError(ApiError):
    """Invalid request; `param` names the part at fault."""

    status = 400
    type = "invalid_request_error"


class UnknownParameterError(BadRequestError):
    """Field that is not part of the API."""

    code = "unknown_parameter"


class UnsupportedParameterError(BadRequestError):
    """Documented field or value that this server cannot honor, and therefore refuses instead of ignoring it."""

    code = "unsupported_parameter"


class ContextLengthExceededError(BadRequestError):
    """Prompt and requested output exceed the context. Lengths are in tokens, where known."""

    code = "context_length_exceeded"

    def __init__(
        self, message: str, *, param: str | None = None, prompt: int = 0, output: int = 0, context: int = 0
    ) -> None:
        super().__init__(message, param=param)
        self.prompt = prompt
        self.output = output
        self.context = context


class FieldError(ValueError):
    """Fault of a field of an object within a body, before the place of the object is known.

    Validators of nested objects raise it, and the reader of the body answers with `located`. `keys` lead from the
    object to the field.
    """

    def __init__(self, message: str, *keys: int | str, error: type[BadRequestError] = BadRequestError) -> None:
        super().__init__(message)
        self.keys = keys
        self._error = error

    def located(self, param: str | None) -> BadRequestError:
        """Return the error for the field at `param`, which replaces `{param}` in the message."""
        return self._error(str(self).replace("{param}", f"'{param}'"), param=param)


class UnauthorizedError(ApiError):
    """Missing or wrong API key."""

    status = 401
    type = "invalid_request_error"
    code = "invalid_api_key"

    def headers(self) -> dict[str, str]:
        """Name the scheme, as RFC 9110 requires."""
        return {"www-authenticate": "Bearer"}


class ForbiddenError(ApiError):
    """API key without permission for this route."""

    status = 403
    type = "invalid_request_error"
    code = "admin_key_required"


class NotFoundError(ApiError):
    """Unknown route or object."""

    status = 404
    type = "invalid_request_error"


class ModelNotFoundError(NotFoundError):
    """Unknown model."""

    code = "model_not_found"


class MethodNotAllowedError(ApiError):
    """Route that exists for another method."""

    status = 405
    type = "invalid_request_error"
    code = "method_not_allowed"


class RequestTimeoutError(ApiError):
    """Body that took too long to arrive."""

    status = 408
    type = "invalid_request_error"
    code = "request_timeout"


class PayloadTooLargeError(ApiError):
    """Body that is longer than the server reads."""

    status = 413
    type = "invalid_request_error"
    code = "request_too_large"


class UnsupportedMediaTypeError(ApiError):
    """Body that is not JSON."""

    status = 415
    type = "invalid_request_error"
    code = "unsupported_media_type"


class RateLimitError(ApiError):
    """API key with too many requests in flight."""

    status = 429
    type = "rate_limit_error"
    code = "rate_limit_exceeded"


class HeadersTooLongError(ApiError):
    """Request head, or trailer of its body, that is longer than the server reads."""

    status = 431
    type = "invalid_request_error"
    code = "request_headers_too_long"


class RequestAbortedError(ApiError):
    """Request that was aborted on demand while it ran."""

    status = 499
    type = "invalid_request_error"
    code = "request_aborted"


class ServerError(ApiError):
    """Failure of the server."""


class DeadlyRequestError(ServerError):
    """Request that crashes schedulers repeatedly."""

    def headers(self) -> dict[str, str]:
        """Stop the retries of OpenAI's and Anthropic's clients."""
        return {"x-should-retry": "false"}


class UnavailableError(ApiError):
    """Lack of a ready scheduler or detokenizer."""

    status = 503
    code = "service_unavailable"


def _shortened(text: str, longest: int) -> str:
    """Truncate a text."""
    return text if len(text) <= longest else f"{text[: longest - 1]}…"


def from_rejection(code: str, message: str, param: str | None = None) -> ApiError:
    """Return the error for a scheduler's `Rejected`, whose code decides the status."""
    match code:
        case "context_length_exceeded":
            return ContextLengthExceededError(message, param=param)
        case "overloaded" | "draining":
            return UnavailableError(message, code=code, retry_after=1)
        case _:
            return BadRequestError(message, param=param, code=code)
