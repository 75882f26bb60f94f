"""Guard around a grammar backend: any exception becomes the error of one matcher, and so of one request."""

import logging
from collections.abc import Callable, Sequence
from typing import Generic, Self, TypeVar

from tercet.protocol.messages.values import Grammar
from tercet.scheduler.grammar.port import GrammarBackend, GrammarError, M, Masks

logger = logging.getLogger(__name__)

_T = TypeVar("_T")
_OURS = (KeyboardInterrupt, SystemExit)
"""Exceptions that pass. All others are caught, because a panic in Rust is not an Exception."""


class GuardedMatcher(Generic[M]):
    """Matcher that has an error once the inner one has raised, and no longer calls it."""

    def __init__(self, inner: M) -> None:
        self.inner = inner
        self._fault = ""

    @property
    def error(self) -> str:
        return self._ask(lambda matcher: matcher.error, "") or self._fault

    @property
    def accepting(self) -> bool:
        return self._ask(lambda matcher: matcher.accepting, False)

    @property
    def finished(self) -> bool:
        return self._ask(lambda matcher: matcher.finished, False)

    def advance(self, tokens: Sequence[int]) -> None:
        self._ask(lambda matcher: matcher.advance(tokens), None)

    def forced(self) -> list[int]:
        return self._ask(lambda matcher: matcher.forced(), [])

    def copy(self) -> Self:
        """Return another matcher in the same state. Raises GrammarError if the inner one raises."""
        try:
            return type(self)(self.inner.copy())
        except _OURS:
            raise
        except BaseException as error:
            raise GrammarError(_told(error)) from error

    def fail(self, error: BaseException) -> None:
        """Set the error for an exception of the inner matcher."""
        self._fault = _told(error)

    def _ask(self, question: Callable[[M], _T], otherwise: _T) -> _T:
        if self._fault:
            return otherwise
        try:
            return question(self.inner)
        except _OURS:
            raise
        except BaseException as error:
            self.fail(error)
            return otherwise


class GuardedBackend(Generic[M]):
    """Backend whose exceptions become GrammarErrors and errors of single matchers."""

    def __init__(self, inner: GrammarBackend[M]) -> None:
        self._inner = inner

    @property
    def name(self) -> str:
        return self._inner.name

    @property
    def end_ids(self) -> Sequence[int]:
        return self._inner.end_ids

    def compile(self, grammar: Grammar) -> GuardedMatcher[M]:
        """Return a matcher at the beginning of an output. Raises GrammarError."""
        try:
            return GuardedMatcher(self._inner.compile(grammar))
        except (GrammarError, *_OURS):
            raise
        except BaseException as error:
            raise GrammarError(_told(error)) from error

    def fill(self, matchers: Sequence[GuardedMatcher[M]], masks: Masks) -> None:
        """Fill all masks at once. If that raises, fill one by one, to find the matcher at fault."""
        try:
            self._inner.fill([each.inner for each in matchers], masks)
        except _OURS:
            raise
        except BaseException:
            for row, each in enumerate(matchers):
                self._fill_one(each, masks[row : row + 1])

    def _fill_one(self, matcher: GuardedMatcher[M], mask: Masks) -> None:
        try:
            self._inner.fill([matcher.inner], mask)
        except _OURS:
            raise
        except BaseException as error:
            matcher.fail(error)


def _told(error: BaseException) -> str:
    """Log an exception and return its kind. Its message may contain user data and is logged at debug level only."""
    kind = type(error).__name__
    logger.error("grammar backend: exception, its request fails: type=%s", kind)
    logger.debug("grammar backend: exception", exc_info=error)
    return f"the backend raised {kind}"
