"""What the API keys of one server have of it: so many requests at a time, a share, and a prefix cache of its own."""

import hashlib
from collections import Counter

import msgspec

from tercet.frontend.config.config import HttpConfig
from tercet.frontend.errors import BadRequestError, RateLimitError
from tercet.frontend.http.auth import current_caller
from tercet.frontend.manager.request import GenerateRequest

_TENANT_DIGITS = 32
"""As many as keep keys apart: they travel with each request."""


class RequestSlot:
    """The places that one request takes of those that its key may have. Giving them back again is harmless."""

    def __init__(self, taken: Counter[str], owner: str, answers: int) -> None:
        self._taken = taken
        self._owner = owner
        self._held = answers
        taken[owner] += answers

    def give_back(self) -> None:
        """The request has ended, however it did."""
        if self._held:
            self._taken[self._owner] -= self._held
            self._held = 0
            if not self._taken[self._owner]:
                del self._taken[self._owner]


class ApiKeyQuota:
    """Counts and separates by the key of `current_caller`. Requests without a key are not limited.

    A key may have `most_requests` answers in flight: prompts times choices. 0 is no limit.
    """

    def __init__(self, most_requests: int = 0, *, caches_apart: bool = False) -> None:
        self._most = most_requests
        self._caches_apart = caches_apart
        self._taken: Counter[str] = Counter()

    @classmethod
    def of(cls, config: HttpConfig) -> "ApiKeyQuota":
        """The tenants that the options describe. Raises OSError, and ValueError for options that cannot be meant."""
        keys = set(config.api_keys())
        if config.max_requests_per_key and not keys:
            raise ValueError("--max-requests-per-key counts by API key, and this server has none: give it --api-key")
        return cls(config.max_requests_per_key, caches_apart=len(keys) > 1 and not config.share_cache_between_keys)

    def place(self, answers: int = 1, param: str | None = None) -> RequestSlot:
        """Return the place of one more request, which asks for so many `answers`.

        Raises RateLimitError while its key has all it may have, and BadRequestError, naming `param`, for a request that
        asks for more than its key may ever have.
        """
        visitor = current_caller()
        limited = self._most and visitor.owner and not (visitor.admin or visitor.returning)
        if limited and answers > self._most:
            raise BadRequestError(
                f"The request asks for {answers} answers (prompts times choices), and an API key may have "
                f"{self._most} in flight here: ask for fewer in one request.",
                param=param,
            )
        if limited and (taken := self._taken[visitor.owner]) + answers > self._most:
            raise RateLimitError(
                f"This API key has {taken} answers in flight, and the request asks for {answers} more. "
                f"It may have {self._most} at a time.",
                retry_after=1,
            )
        return RequestSlot(self._taken, visitor.owner, answers)

    def tenant(self) -> str:
        """What tells schedulers whose a request is, but nothing of the key; empty where there are no keys."""
        owner = current_caller().owner
        return _hashed("tercet tenant", owner)[:_TENANT_DIGITS] if owner else ""

    def marked(self, request: GenerateRequest) -> GenerateRequest:
        """The request with what tells schedulers whose it is, and a salt that only requests like it have.

        Those are of the same key and the same own salt: otherwise a client would learn from cached tokens, and from
        times, what others have asked. Both are the same at every frontend and after every restart, and tell nothing of
        the key.
        """
        owner = current_caller().owner
        if not owner:
            return request
        salt = _hashed("tercet cache salt", owner, request.cache_salt) if self._caches_apart else request.cache_salt
        return msgspec.structs.replace(request, tenant=self.tenant(), cache_salt=salt)


def _hashed(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()
