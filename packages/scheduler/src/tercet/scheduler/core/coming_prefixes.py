"""Prompts that are being computed, for those that begin alike and had better wait for them."""

from collections.abc import Iterable

from tercet.scheduler.core.prefix_cache import PrefixCache
from tercet.scheduler.core.request import Req

LEAST_SPARED = 64
"""Tokens that are worth being put off for: a step takes as long with fewer."""


class ComingPrefixes:
    """What the prefix cache will have as soon as prompts of running choices are computed.

    Of choices that arrive together with the same beginning, the first computes it and the others find it a few steps
    later, where each would compute its own. SGLang puts off such choices, too; vLLM shares pages as soon as they are
    planned, which here would share them before it is known that they came to finite logits.
    """

    def __init__(self, running: Iterable[Req], page_size: int) -> None:
        self._page_size = page_size
        self._by_page: dict[tuple[str, bytes], list[Req]] = {}
        for req in running:
            self.add(req)

    def add(self, req: Req) -> None:
        """A choice runs. Nobody waits for one whose prompt is shared already, or never will be."""
        if not req.published and req.finish is None and req.prompt_tokens >= self._page_size:
            self._by_page.setdefault(self._first_page(req), []).append(req)

    def is_worth_waiting(self, req: Req, cache: PrefixCache) -> bool:
        """Whether a prompt being computed spares a waiting choice as many tokens as that prompt has left to plan."""
        alike = self._by_page.get(self._first_page(req))
        if not alike:
            return False
        cached = req.cached_pages(cache)
        for other in alike:
            spared = (_common_pages(req, other, self._page_size) - cached) * self._page_size
            if spared >= max(LEAST_SPARED, other.prompt_tokens - other.computed):
                return True
        return False

    def _first_page(self, req: Req) -> tuple[str, bytes]:
        return req.salt, req.cache_key(self._page_size)


def _common_pages(req: Req, other: Req, page_size: int) -> int:
    """Whole pages with which two begin alike, of those that the one can reuse and that are of the other's prompt."""
    alike, unlike = 0, min(req.reusable, other.prompt_tokens) // page_size + 1
    one, another = memoryview(req.tokens), memoryview(other.tokens)
    while unlike - alike > 1:
        middle = (alike + unlike) // 2
        same = one[: middle * page_size] == another[: middle * page_size]
        alike, unlike = (middle, unlike) if same else (alike, middle)
    return alike
