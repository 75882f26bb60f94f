"""Who asks: API keys and admin keys, and what a request may do with the one it shows."""

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

_SCOPE = "tercet.visitor"


class Caller(msgspec.Struct, frozen=True):
    """The sender of a request. `owner` is a hash of its key, empty on a server that asks for none."""

    owner: str = ""
    admin: bool = False
    returning: bool = False
    """Its work was admitted before and is begun again: the key's limits do not apply."""


_NOBODY = Caller()
_current: ContextVar[Caller] = ContextVar("visitor")


class Keys:
    """Keys by their SHA-256, so that comparing takes the same time for every wrong one. An admin key opens all.

    Raises ValueError for a key that nobody, or everybody, could show.
    """

    def __init__(self, api_keys: Iterable[str], admin_keys: Iterable[str] = ()) -> None:
        api, admin = tuple(api_keys), tuple(admin_keys)
        check_keys("a key", (*api, *admin))
        self._api = [_digest(key) for key in api]
        self._admin = [_digest(key) for key in admin]

    def visitor(self, headers: Headers) -> Caller | None:
        """Who shows these headers; None for whoever may not come in. Without API keys everyone may."""
        shown = _digest(_shown(headers))
        admin, known = _among(shown, self._admin), _among(shown, self._api)
        if not (admin or known or not self._api):
            return None
        return Caller(shown.hex() if admin or known else "", admin)


def remember(scope: Scope, visitor: Caller) -> None:
    """Let the routes, and all that is done for them, know who asks."""
    scope[_SCOPE] = visitor
    _current.set(visitor)


def resume_for(owner: str) -> None:
    """From here on the current task works for a visitor who asked earlier, and need not be connected any more."""
    _current.set(Caller(owner, returning=True))


def current_caller() -> Caller:
    """For whom the current task works: who sent the request that began it, at whatever route."""
    return _current.get(_NOBODY)


def caller_of(request: Request) -> Caller:
    """Who asks. What belongs to one `owner` is not there for another."""
    visitor = request.scope.get(_SCOPE, Caller())
    assert isinstance(visitor, Caller)
    return visitor


def require_admin(request: Request) -> None:
    """Raises ForbiddenError unless the request shows an admin key. A server without one has no administrators."""
    if not caller_of(request).admin:
        raise ForbiddenError("This needs a key that was given to the server with --admin-key.")


def shows_key(headers: Headers) -> bool:
    """Whether these have any key at all, right or wrong."""
    return bool(_shown(headers))


def _shown(headers: Headers) -> str:
    """The key in `Authorization: Bearer`, else in `x-api-key`."""
    scheme, _, key = headers.get("authorization", "").partition(" ")
    return key.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "")


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()


def _among(digest: bytes, digests: list[bytes]) -> bool:
    """Compares with all of them, also after one is equal."""
    return sum(hmac.compare_digest(digest, each) for each in digests) > 0
