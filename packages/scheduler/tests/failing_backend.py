"""A grammar backend that does what none should: it raises."""

from typing import Any

from tercet.protocol.messages.values import Grammar
from tercet.scheduler.grammar.port import GrammarBackend, Masks, Matcher


class SimulatedPanic(BaseException):
    """As what a panic in Rust becomes, it is no Exception."""


class FailingMatcher:
    """A matcher that raises where it is asked a thing; of a mask, not before it has two tokens."""

    def __init__(self, inner: Matcher, where: str, seen: int = 0) -> None:
        self.inner, self.where, self.seen = inner, where, seen

    def __getattr__(self, name: str) -> Any:
        if name == self.where:
            raise SimulatedPanic(name)
        return getattr(self.inner, name)

    def advance(self, tokens: list[int]) -> None:
        if self.where == "advance":
            raise SimulatedPanic("advance")
        self.seen += len(tokens)
        self.inner.advance(tokens)

    def copy(self) -> "FailingMatcher":
        if self.where == "copy":
            raise SimulatedPanic("copy")
        return FailingMatcher(self.inner.copy(), self.where, self.seen)


class FailingBackend:
    """A backend that raises for one grammar."""

    def __init__(self, inner: GrammarBackend[Any], where: str, text: str) -> None:
        self.inner, self.where, self.text = inner, where, text
        self.name, self.end_ids = inner.name, inner.end_ids

    def compile(self, grammar: Grammar) -> Any:
        if grammar.text != self.text:
            return self.inner.compile(grammar)
        if self.where == "compile":
            raise SimulatedPanic("compile")
        return FailingMatcher(self.inner.compile(grammar), self.where)

    def fill(self, matchers: list[Any], masks: Masks) -> None:
        if any(isinstance(each, FailingMatcher) and each.where == "fill" and each.seen > 1 for each in matchers):
            raise SimulatedPanic("fill")
        self.inner.fill([each.inner if isinstance(each, FailingMatcher) else each for each in matchers], masks)
