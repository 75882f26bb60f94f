"""The id of an HTTP request, by which clients and logs name it. Every response has it."""

import re
import secrets
from contextvars import ContextVar

from starlette.datastructures import Headers
from starlette.types import Scope

_SCOPE = "tercet.request_id"
_current: ContextVar[str] = ContextVar("request id", default="")
_ID = re.compile(r"[\x21-\x7e]{1,128}")


def assign_request_id(scope: Scope, headers: Headers) -> str:
    """Return the client's own request id, or a new one, and store it in the scope and in the task's context."""
    own = headers.get("x-request-id", "")
    scope[_SCOPE] = own if _ID.fullmatch(own) else new_request_id()
    _current.set(scope[_SCOPE])
    return request_id_of(scope)


def new_request_id() -> str:
    return f"req_{secrets.token_hex(16)}"


def request_id_of(scope: Scope) -> str:
    """Return the id that `assign_request_id` stored."""
    request_id: str = scope[_SCOPE]
    return request_id


def current_request_id() -> str:
    """Return the id of the request that started the current task; empty without HTTP."""
    return _current.get()
