"""API keys and admin keys: authentication of requests, and the caller of the current task."""

import hashlib
import hmac
from collections.abc import Iterable
from contextvars import ContextVar

import msgspec
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.types import Scope

from tercet.frontend.config.validation import check_keys
from tercet.frontend.errors import ForbiddenError

_SCOPE = "tercet.caller"


class Caller(msgspec.Struct, frozen=True):
    """The sender of a request. `owner` is the hash of its API key; it is empty on a server without API keys."""

    owner: str = ""
    admin: bool = False
    resumed: bool = False
    """The work was admitted before and is resumed: the limits of the key do not apply."""


_ANONYMOUS = Caller()
_current: ContextVar[Caller] = ContextVar("caller")


class Keys:
    """Registered keys, stored as SHA-256 digests, so that every wrong key takes the same time to compare.

    An admin key grants access to everything; with `open_admin`, every admitted caller has it. Raises
    ValueError for an empty key and for one that no header can carry.
    """

    def __init__(self, api_keys: Iterable[str], admin_keys: Iterable[str] = (), *, open_admin: bool = False) -> None:
        api, admin = tuple(api_keys), tuple(admin_keys)
        check_keys("a key", (*api, *admin))
        self._api = [_digest(key) for key in api]
        self._admin = [_digest(key) for key in admin]
        self._open_admin = open_admin

    def authenticate(self, headers: Headers) -> Caller | None:
        """Return the caller that these headers identify, or None for a missing or wrong key.

        A server without API keys admits every caller.
        """
        digest = _digest(_key_of(headers))
        admin, known = _matches_any(digest, self._admin), _matches_any(digest, self._api)
        if not (admin or known or not self._api):
            return None
        return Caller(digest.hex() if admin or known else "", admin or self._open_admin)


def set_caller(scope: Scope, caller: Caller) -> None:
    """Store the caller in the scope and in the context of the current task."""
    scope[_SCOPE] = caller
    set_current_caller(caller)


def set_current_caller(caller: Caller) -> None:
    """Store the caller in the context of the current task."""
    _current.set(caller)


def set_resumed_caller(owner: str) -> None:
    """Let the current task work for a caller whose request came earlier; its client may have disconnected since."""
    set_current_caller(Caller(owner, resumed=True))


def current_caller() -> Caller:
    """Return the caller whose request started the current task."""
    return _current.get(_ANONYMOUS)


def caller_of(request: Request) -> Caller:
    """Return the caller of a request. Stored objects are visible to their `owner` only."""
    caller = request.scope.get(_SCOPE, Caller())
    assert isinstance(caller, Caller)
    return caller


def require_admin(request: Request) -> None:
    """Raise ForbiddenError unless the request has an admin key. A server without admin keys refuses all callers."""
    if not caller_of(request).admin:
        raise ForbiddenError("This needs a key that was given to the server with --admin-key.")


def has_key(headers: Headers) -> bool:
    """Return whether the headers have any key, right or wrong."""
    return bool(_key_of(headers))


def _key_of(headers: Headers) -> str:
    """Return the key in `Authorization: Bearer`, else the one in `x-api-key`."""
    scheme, _, key = headers.get("authorization", "").partition(" ")
    return key.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "")


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()


def _matches_any(digest: bytes, digests: list[bytes]) -> bool:
    """Compare with every digest, even after a match, so that the time reveals nothing."""
    return sum(hmac.compare_digest(digest, each) for each in digests) > 0
