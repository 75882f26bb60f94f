"""Prefixes that the prefix cache will contain once the prompts of running choices are computed."""

from collections.abc import Callable, Iterable

from tercet.scheduler.core.cache.prefix_cache import PrefixCache
from tercet.scheduler.core.memory import KVMemory
from tercet.scheduler.core.request import Req

LEAST_SPARED = 64
"""Minimum tokens saved to put a choice off: a step takes as long with fewer."""


class InFlightPrefixes:
    """Index of the prefixes that the prefix cache will contain once the prompts of running choices are computed.

    Of choices that arrive together with the same prefix, the first computes it and the others find it a few steps
    later; otherwise each would compute its own. SGLang puts off such choices, too. vLLM shares pages as soon as they
    are planned, which here would share them before their logits are known to be finite.
    """

    def __init__(self, running: Iterable[Req], memory: KVMemory) -> None:
        self._page_size = page_size = memory.page_size
        self._states = memory.states
        self._least = page_size * -(-LEAST_SPARED // page_size)
        """Minimum common tokens of two prompts for one to wait: `LEAST_SPARED`, rounded up to whole pages."""
        self._by_beginning: dict[tuple[str, bytes], list[Req]] = {}
        for req in running:
            self.add(req)

    def add(self, req: Req, waiting: Callable[[], Iterable[Req]] = tuple) -> None:
        """Add a running choice, unless its prompt is shared already or never will be.

        If the model keeps a recurrent state, the choice takes a snapshot where each waiting prompt parts from its own.
        """
        if req.published or req.finish is not None or req.prompt_tokens < self._least:
            return
        beginning = self._beginning(req)
        self._by_beginning.setdefault(beginning, []).append(req)
        for other in waiting() if self._states is not None else ():
            if other is not req and other.reusable >= self._least and self._beginning(other) == beginning:
                self._branch(other, req, self._least)

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
                return self._states is None or self._will_have_state(req, other, end)
        return False

    def _will_have_state(self, req: Req, other: Req, least: int) -> bool:
        """Return whether a running prompt will have a snapshot in the common prefix, after `least` tokens or more."""
        assert self._states is not None
        parting = self._branch(req, other, least)
        return 0 <= self._states.next_place(other, least) <= parting

    def _branch(self, req: Req, other: Req, least: int = 0) -> int:
        """Return the whole pages that two prompts have in common, in tokens: `least` or more.

        The running one, `other`, takes a snapshot where they part, if it has not been planned so far.
        """
        assert self._states is not None
        most = min(req.reusable, other.prompt_tokens)
        parting = _common_tokens(req, other, least, most) // self._page_size * self._page_size
        if parting > other.computed:
            self._states.branch(other, parting)
        return parting

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


def _common_tokens(req: Req, other: Req, least: int, most: int) -> int:
    """Return the length of the common prefix of two prompts, which is known to be between `least` and `most`."""
    while least < most:
        middle = (least + most + 1) // 2
        if req.tokens[least:middle] == other.tokens[least:middle]:
            least = middle
        else:
            most = middle - 1
    return least
