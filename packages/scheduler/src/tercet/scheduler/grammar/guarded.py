"""Holds a backend to its port: whatever it raises is the error of one matcher, and so of one request."""

import logging
from collections.abc import Callable, Sequence
from typing import Generic, Self, TypeVar

from tercet.protocol.messages.values import Grammar
from tercet.scheduler.grammar.port import GrammarBackend, GrammarError, M, Masks

logger = logging.getLogger(__name__)

_T = TypeVar("_T")
_OURS = (KeyboardInterrupt, SystemExit)
"""What no backend means. All else is caught: a panic in Rust is no Exception."""


class GuardedMatcher(Generic[M]):
    """A matcher that has an error once the one inside has raised, and asks it no more."""

    def __init__(self, inner: M) -> None:
        self.inner = inner
        self._fault = ""

    @property
    def error(self) -> str:
        """What went wrong, for a log."""
        return self._ask(lambda matcher: matcher.error, "") or self._fault

    @property
    def accepting(self) -> bool:
        """Whether the output so far is an instance of the grammar."""
        return self._ask(lambda matcher: matcher.accepting, False)

    @property
    def finished(self) -> bool:
        """Whether nothing but an end token can follow."""
        return self._ask(lambda matcher: matcher.finished, False)

    def advance(self, tokens: Sequence[int]) -> None:
        """Append tokens to the output."""
        self._ask(lambda matcher: matcher.advance(tokens), None)

    def forced(self) -> list[int]:
        """The tokens that must come next."""
        return self._ask(lambda matcher: matcher.forced(), [])

    def copy(self) -> Self:
        """Another matcher at the same place. Raises GrammarError where there is none."""
        try:
            return type(self)(self.inner.copy())
        except _OURS:
            raise
        except BaseException as error:
            raise GrammarError(_told(error)) from error

    def fail(self, error: BaseException) -> None:
        """It has raised."""
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
    """The backend inside, but that a grammar or matcher it cannot bear is no exception of anybody else's."""

    def __init__(self, inner: GrammarBackend[M]) -> None:
        self._inner = inner

    @property
    def name(self) -> str:
        """Name and version."""
        return self._inner.name

    @property
    def end_ids(self) -> Sequence[int]:
        """Tokens that end a text."""
        return self._inner.end_ids

    def compile(self, grammar: Grammar) -> GuardedMatcher[M]:
        """A matcher at the beginning of an output. Raises GrammarError."""
        try:
            return GuardedMatcher(self._inner.compile(grammar))
        except (GrammarError, *_OURS):
            raise
        except BaseException as error:
            raise GrammarError(_told(error)) from error

    def fill(self, matchers: Sequence[GuardedMatcher[M]], masks: Masks) -> None:
        """All at once; where that raises, one by one, which tells whose fault it is."""
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
    """For a log. What the exception says may hold what users wrote, and is told to those who debug."""
    kind = type(error).__name__
    logger.error("a grammar backend raised %s", kind)
    logger.debug("a grammar backend raised", exc_info=error)
    return f"the backend raised {kind}"
