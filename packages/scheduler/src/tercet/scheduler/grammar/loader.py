"""Loader of grammars: reads them before their choices are planned, so that no step waits for one."""

from collections.abc import Collection
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Lock
from typing import Any

from tercet.protocol.messages.values import Grammar
from tercet.scheduler.grammar.cache import GrammarCache
from tercet.scheduler.grammar.port import GrammarError, Matcher

MOST_READ = 256
"""Maximum grammars of held choices that are kept at once; more wait until others are no longer needed."""
_THREADS = 2
_LONGEST_FAULT = 400


class GrammarLoader:
    """Reads each grammar once for all its choices. Use it from one thread; only `copy` is thread-safe."""

    def __init__(self, cache: GrammarCache[Any]) -> None:
        self._cache = cache
        self._read: dict[Grammar, Future[Matcher]] = {}
        self._line: dict[Grammar, None] = {}
        self._unread: dict[Grammar, None] = {}
        """Requested grammars whose end of reading was not reported yet."""
        self._copying = Lock()
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="read grammar")

    @property
    def busy(self) -> bool:
        """Return whether `take_read` will return grammars, now or later."""
        return bool(self._unread)

    def want(self, grammar: Grammar) -> bool:
        """Return whether a grammar is read or has failed. If not, start reading it; `take_read` reports the end."""
        if grammar not in self._read and grammar not in self._line:
            known = self._known(grammar)
            if known is None:
                self._line[grammar] = None
                self._begin()
            else:
                self._read[grammar] = Future()
                self._read[grammar].set_result(known)
        if grammar in self._read and self._read[grammar].done():
            return True
        self._unread[grammar] = None
        return False

    def take_read(self) -> list[Grammar]:
        """Return requested grammars that are read by now or no longer needed; each is returned once."""
        read = [each for each in self._unread if each not in self._line and self._is_over(each)]
        for each in read:
            del self._unread[each]
        return read

    def fault(self, grammar: Grammar) -> str:
        """Return why a read grammar is invalid; empty while no error is known."""
        read = self._read.get(grammar)
        error = read.exception() if read is not None and read.done() else None
        return "" if error is None else " ".join(str(error).split())[:_LONGEST_FAULT]

    def keep(self, wanted: Collection[Grammar]) -> None:
        """Forget all other grammars."""
        for each in [each for each in self._line if each not in wanted]:
            del self._line[each]
        for each in [each for each in self._read if each not in wanted and self._is_over(each)]:
            del self._read[each]
        self._begin()

    def reading(self, grammar: Grammar) -> Future[Matcher]:
        """Return the future of a matcher at the beginning, for `copy`.

        Starts reading if the grammar was never requested.
        """
        found = self._read.get(grammar)
        return found if found is not None else self._threads.submit(self._cache.matcher, grammar)

    def copy(self, read: Future[Matcher]) -> Matcher:
        """Return a new matcher. Waits until it is read; raises GrammarError if that failed."""
        matcher = read.result()
        with self._copying:
            return matcher.copy()

    def close(self) -> None:
        """Stop the threads."""
        self._threads.shutdown(cancel_futures=True)

    def _known(self, grammar: Grammar) -> Matcher | None:
        try:
            return self._cache.known(grammar)
        except GrammarError:  # the error of a copy; reading it again reports it
            return None

    def _begin(self) -> None:
        while self._line and len(self._read) < MOST_READ:
            grammar = next(iter(self._line))
            del self._line[grammar]
            self._read[grammar] = self._threads.submit(self._cache.matcher, grammar)

    def _is_over(self, grammar: Grammar) -> bool:
        read = self._read.get(grammar)
        return read is None or read.done()
