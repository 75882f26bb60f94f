"""Limits and isolation per API key: concurrent answers, tenant id and prefix-cache salt."""

import hashlib
from collections import Counter

import msgspec

from tercet.frontend.config.config import HttpConfig
from tercet.frontend.errors import BadRequestError, RateLimitError
from tercet.frontend.http.auth import current_caller
from tercet.frontend.manager.request import GenerateRequest

_TENANT_DIGITS = 32
"""Hex digits of a tenant id, which travels with each request; enough to avoid collisions."""


class RequestSlot:
    """Quota that one request holds for its API key. Returning it twice is harmless."""

    def __init__(self, taken: Counter[str], owner: str, answers: int) -> None:
        self._in_use = taken
        self._owner = owner
        self._held = answers
        self.admitted_at = 0.0
        """Time of the admission, in seconds of the request table's clock."""
        taken[owner] += answers

    def release(self) -> None:
        """Return the quota once the request has ended."""
        if self._held:
            self._in_use[self._owner] -= self._held
            self._held = 0
            if not self._in_use[self._owner]:
                del self._in_use[self._owner]


class ApiKeyQuota:
    """Quota and isolation by the API key of `current_caller`. Requests without a key are not limited.

    A key may have `max_answers` answers in flight: prompts times choices. 0 means no limit.
    """

    def __init__(self, max_answers: int = 0, *, isolate_caches: bool = False) -> None:
        self._max_answers = max_answers
        self._isolate_caches = isolate_caches
        self._in_use: Counter[str] = Counter()

    @classmethod
    def of(cls, config: HttpConfig) -> "ApiKeyQuota":
        """Create the quota from the options. Raises OSError, and ValueError for contradictory options."""
        keys = set(config.api_keys())
        if config.max_requests_per_key and not keys:
            raise ValueError("--max-requests-per-key counts by API key, and this server has none: give it --api-key")
        return cls(config.max_requests_per_key, isolate_caches=len(keys) > 1 and not config.share_cache_between_keys)

    def acquire(self, answers: int = 1, param: str | None = None) -> RequestSlot:
        """Reserve quota for a request with this number of answers.

        Raises RateLimitError while the key has no quota left, and BadRequestError, naming `param`, for a request that
        exceeds the whole quota of its key.
        """
        caller = current_caller()
        limited = self._max_answers and caller.owner and not (caller.admin or caller.resumed)
        if limited and answers > self._max_answers:
            raise BadRequestError(
                f"The request asks for {answers} answers (prompts times choices), and an API key may have "
                f"{self._max_answers} in flight here: ask for fewer in one request.",
                param=param,
            )
        if limited and (taken := self._in_use[caller.owner]) + answers > self._max_answers:
            raise RateLimitError(
                f"This API key has {taken} answers in flight, and the request asks for {answers} more. "
                f"It may have {self._max_answers} at a time.",
                retry_after=1,
            )
        return RequestSlot(self._in_use, caller.owner, answers)

    def tenant(self) -> str:
        """Return the caller's tenant id, a hash that does not reveal the key; empty if the server has no keys."""
        owner = current_caller().owner
        return _hashed("tercet tenant", owner)[:_TENANT_DIGITS] if owner else ""

    def with_tenant(self, request: GenerateRequest) -> GenerateRequest:
        """Return the request with its tenant id and a cache salt that isolates it from other API keys.

        Requests share cached prefixes only if key and client salt are equal. Otherwise a client could learn from
        cached-token counts and from latencies which prompts others have sent. Tenant and salt are the same on every
        frontend and after every restart, and do not reveal the key.
        """
        owner = current_caller().owner
        if not owner:
            return request
        options = request.options
        if self._isolate_caches:
            salt = _hashed("tercet cache salt", owner, options.cache_salt)
            options = msgspec.structs.replace(options, cache_salt=salt)
        return msgspec.structs.replace(request, tenant=self.tenant(), options=options)


def _hashed(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()
