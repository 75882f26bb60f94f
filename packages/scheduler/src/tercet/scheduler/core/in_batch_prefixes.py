"""Prompts that are being computed, for those that begin alike and had better wait for them."""

from collections.abc import Iterable

from tercet.scheduler.core.prefix_cache import PrefixCache
from tercet.scheduler.core.request import Req

LEAST_SPARED = 64
"""Tokens that are worth being put off for: a step takes as long with fewer."""


class InFlightPrefixes:
    """What the prefix cache will have as soon as prompts of running choices are computed.

    Of choices that arrive together with the same beginning, the first computes it and the others find it a few steps
    later, where each would compute its own. SGLang puts off such choices, too; vLLM shares pages as soon as they are
    planned, which here would share them before it is known that they came to finite logits.
    """

    def __init__(self, running: Iterable[Req], page_size: int) -> None:
        self._page_size = page_size
        self._least = page_size * -(-LEAST_SPARED // page_size)
        """The fewest tokens that two prompts must have in common for one to wait: `LEAST_SPARED`, in whole pages."""
        self._by_beginning: dict[tuple[str, bytes], list[Req]] = {}
        for req in running:
            self.add(req)

    def add(self, req: Req) -> None:
        """A choice runs. Nobody waits for one whose prompt is shared already, or never will be."""
        if not req.published and req.finish is None and req.prompt_tokens >= self._least:
            self._by_beginning.setdefault(self._beginning(req), []).append(req)

    def is_worth_waiting(self, req: Req, cache: PrefixCache) -> bool:
        """Whether a prompt being computed spares a waiting choice as many tokens as that prompt has left to plan."""
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
    """Whether two prompts have the same tokens up to `end`, of which those up to `cached` are in the prefix cache.

    Prompts that differ mostly do so right behind the cached tokens. These places are compared first, since prompts can
    be long, and each that waits may be compared with each that runs.
    """
    one, another = req.tokens, other.tokens
    return (
        one[cached] == another[cached] and one[cached:end] == another[cached:end] and one[:cached] == another[:cached]
    )
