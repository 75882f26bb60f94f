"""Prompts that are being computed, for waiting choices with the same prefix."""

from collections.abc import Iterable

from tercet.scheduler.core.prefix_cache import PrefixCache
from tercet.scheduler.core.request import Req

LEAST_SPARED = 64
"""Minimum tokens saved to put a choice off: a step takes as long with fewer."""


class InFlightPrefixes:
    """Index of the prefixes that the prefix cache will contain once the prompts of running choices are computed.

    Of choices that arrive together with the same prefix, the first computes it and the others find it a few steps
    later; otherwise each would compute its own. SGLang puts off such choices, too. vLLM shares pages as soon as they
    are planned, which here would share them before their logits are known to be finite.
    """

    def __init__(self, running: Iterable[Req], page_size: int) -> None:
        self._page_size = page_size
        self._least = page_size * -(-LEAST_SPARED // page_size)
        """Minimum common tokens of two prompts for one to wait: `LEAST_SPARED`, rounded up to whole pages."""
        self._by_beginning: dict[tuple[str, bytes], list[Req]] = {}
        for req in running:
            self.add(req)

    def add(self, req: Req) -> None:
        """Add a running choice, unless its prompt is shared already or never will be."""
        if not req.published and req.finish is None and req.prompt_tokens >= self._least:
            self._by_beginning.setdefault(self._beginning(req), []).append(req)

    def is_worth_waiting(self, req: Req, cache: PrefixCache) -> bool:
        """Return whether a running prompt saves a waiting choice as many tokens as that prompt has left to plan."""
        alike = self._by_beginning.get(self._beginning(req))
        if not alike:
            return False
        cached = req.cached_pages(cache) * self._page_size
        reusable = req.reusable
        for other in alike:
            spared = max(LEAST_SPARED, other.prompt_tokens - other.computed)
            end = cached + self._page_size * -(-spared // self._page_size)
            if end <= reusable and end <= other.prompt_tokens and _begin_alike(req, other, cached, end):
                return True
        return False

    def _beginning(self, req: Req) -> tuple[str, bytes]:
        return req.salt, req.cache_key(self._least)


def _begin_alike(req: Req, other: Req, cached: int, end: int) -> bool:
    """Return whether two prompts have the same tokens up to `end`; those up to `cached` are in the prefix cache.

    Prompts that differ mostly do so right behind the cached tokens. These positions are compared first, since prompts
    can be long, and each waiting one may be compared with each running one.
    """
    one, another = req.tokens, other.tokens
    return (
        one[cached] == another[cached] and one[cached:end] == another[cached:end] and one[:cached] == another[:cached]
    )
