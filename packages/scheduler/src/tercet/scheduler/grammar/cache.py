"""Cache of compiled grammars, and their loader."""

from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from threading import Lock
from typing import Generic

from tercet.protocol.messages.values import Grammar
from tercet.scheduler.async_loader import AsyncLoader
from tercet.scheduler.grammar.port import GrammarBackend, GrammarError, M, Matcher

MAX_GRAMMARS = 128
MAX_TEXT = 4 << 20
"""Maximum characters of all cached grammars, which bounds the size of their compiled forms, too."""
_THREADS = 2
_LONGEST_ERROR = 400

GrammarLoader = AsyncLoader[Grammar, Matcher]


class GrammarCache(Generic[M]):
    """LRU cache of grammars, bounded in number and size. Thread-safe."""

    def __init__(self, backend: GrammarBackend[M], max_grammars: int = MAX_GRAMMARS, max_text: int = MAX_TEXT) -> None:
        self._max_grammars, self._max_text = max_grammars, max_text
        self._backend = backend
        self._kept: OrderedDict[Grammar, M] = OrderedDict()
        self._text = 0
        self._lock = Lock()

    def __len__(self) -> int:
        return len(self._kept)

    def known(self, grammar: Grammar) -> M | None:
        """Return a new matcher at the beginning of an output, or None if the grammar is not cached."""
        with self._lock:
            if grammar not in self._kept:
                return None
            self._kept.move_to_end(grammar)
            return self._kept[grammar].copy()

    def matcher(self, grammar: Grammar) -> M:
        """Return a new matcher of any grammar. Raises GrammarError; errors are not cached."""
        known = self.known(grammar)
        if known is not None:
            return known
        compiled = self._backend.compile(grammar)
        with self._lock:
            if grammar not in self._kept:
                self._kept[grammar] = compiled
                self._text += len(grammar.text)
            while len(self._kept) > self._max_grammars or self._text > self._max_text:
                dropped, _ = self._kept.popitem(last=False)
                self._text -= len(dropped.text)
            return compiled.copy()


def grammar_loader(cache: GrammarCache[M]) -> GrammarLoader:
    """Return a loader of matchers at the beginning, of which each choice needs a copy."""

    def known(grammar: Grammar) -> M | None:
        try:
            return cache.known(grammar)
        except GrammarError:  # the error of a copy; loading it again reports it
            return None

    threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="read grammar")
    return AsyncLoader(cache.matcher, threads, known=known, describe=_describe)


def _describe(error: BaseException) -> str:
    return " ".join(str(error).split())[:_LONGEST_ERROR]
