"""What can go wrong with a request, and how the OpenAI API says it.

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

Every one of them ends one request and nothing else.
"""

import orjson

_LONGEST_MESSAGE = 2048
_LONGEST_PARAM = 256
"""Characters: what is wrong may be named in words of the client's, as long as it likes."""


class ApiError(Exception):
    """One OpenAI error body; `code` is a string or null, `retry_after` is in seconds."""

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
        """The JSON that a client reads, also as the data of an event in the middle of a stream."""
        error = {"message": self.message, "type": self.type, "param": self.param, "code": self.code}
        return orjson.dumps({"error": error})

    def headers(self) -> dict[str, str]:
        """What a client needs to know to come back later."""
        return {} if self.retry_after is None else {"retry-after": f"{self.retry_after:g}"}


class BadRequestError(ApiError):
    """The request is at fault, and `param` names the part of it."""

    status = 400
    type = "invalid_request_error"


class UnknownParameterError(BadRequestError):
    """A field that no documentation names."""

    code = "unknown_parameter"


class UnsupportedParameterError(BadRequestError):
    """A documented field or value that this server cannot honour, and so does not ignore."""

    code = "unsupported_parameter"


class ContextLengthExceededError(BadRequestError):
    """Prompt and requested output together are longer than the model can read. Lengths are in tokens, where known."""

    code = "context_length_exceeded"

    def __init__(
        self, message: str, *, param: str | None = None, prompt: int = 0, output: int = 0, context: int = 0
    ) -> None:
        super().__init__(message, param=param)
        self.prompt = prompt
        self.output = output
        self.context = context


class UnauthorizedError(ApiError):
    """No API key, or a wrong one."""

    status = 401
    type = "invalid_request_error"
    code = "invalid_api_key"

    def headers(self) -> dict[str, str]:
        """Names the scheme, as RFC 9110 asks."""
        return {"www-authenticate": "Bearer"}


class ForbiddenError(ApiError):
    """A key that does not open this route."""

    status = 403
    type = "invalid_request_error"
    code = "admin_key_required"


class NotFoundError(ApiError):
    """No such route or object."""

    status = 404
    type = "invalid_request_error"


class ModelNotFoundError(NotFoundError):
    """The model named is not served here."""

    code = "model_not_found"


class MethodNotAllowedError(ApiError):
    """The route exists, for another method."""

    status = 405
    type = "invalid_request_error"
    code = "method_not_allowed"


class RequestTimeoutError(ApiError):
    """The body took too long to arrive."""

    status = 408
    type = "invalid_request_error"
    code = "request_timeout"


class PayloadTooLargeError(ApiError):
    """The body is longer than the server reads."""

    status = 413
    type = "invalid_request_error"
    code = "request_too_large"


class UnsupportedMediaTypeError(ApiError):
    """The body is not JSON."""

    status = 415
    type = "invalid_request_error"
    code = "unsupported_media_type"


class RateLimitError(ApiError):
    """Its API key has as many requests in flight as it may have."""

    status = 429
    type = "rate_limit_error"
    code = "rate_limit_exceeded"


class HeadersTooLongError(ApiError):
    """The head of the request, or what trails its body, is longer than the server reads."""

    status = 431
    type = "invalid_request_error"
    code = "request_headers_too_long"


class RequestAbortedError(ApiError):
    """Somebody asked for the end of the request while it ran."""

    status = 499
    type = "invalid_request_error"
    code = "request_aborted"


class ServerError(ApiError):
    """The server failed this request."""


class DeadlyRequestError(ServerError):
    """Parts of the server die of this request."""

    def headers(self) -> dict[str, str]:
        """What the clients of OpenAI and Anthropic read, who else would send it again."""
        return {"x-should-retry": "false"}


class UnavailableError(ApiError):
    """Nothing is ready to serve the request yet, or any more."""

    status = 503
    code = "service_unavailable"


def _shortened(text: str, longest: int) -> str:
    """The text, or the beginning of it."""
    return text if len(text) <= longest else f"{text[: longest - 1]}…"


def from_rejection(code: str, message: str, param: str | None = None) -> ApiError:
    """The error for a scheduler's `Rejected`: its code decides the status. `param` is at fault, if any is known."""
    match code:
        case "context_length_exceeded":
            return ContextLengthExceededError(message, param=param)
        case "overloaded" | "draining":
            return UnavailableError(message, code=code, retry_after=1)
        case _:
            return BadRequestError(message, param=param, code=code)
