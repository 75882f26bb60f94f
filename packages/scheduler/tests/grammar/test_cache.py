"""Compiled grammars are kept, bounded, and never shared."""

from collections.abc import Sequence

import pytest

from tercet.protocol.messages.values import Grammar, GrammarKind
from tercet.scheduler.grammar.cache import GrammarCache
from tercet.scheduler.grammar.port import GrammarError, Masks


class Tape:
    """A matcher that remembers what it was given."""

    def __init__(self, tokens: Sequence[int] = ()) -> None:
        self.tokens = list(tokens)
        self.error = ""
        self.accepting = self.finished = False

    def advance(self, tokens: Sequence[int]) -> None:
        self.tokens += tokens

    def forced(self) -> list[int]:
        return []

    def copy(self) -> "Tape":
        return Tape(self.tokens)


class Counting:
    """Compiles everything but "bad", and counts."""

    name = "counting 1"
    end_ids = (0,)

    def __init__(self) -> None:
        self.compiled: list[str] = []

    def compile(self, grammar: Grammar) -> Tape:
        self.compiled.append(grammar.text)
        if grammar.text == "bad":
            raise GrammarError("bad")
        return Tape()

    def fill(self, matchers: Sequence[Tape], masks: Masks) -> None:
        raise NotImplementedError


def grammar(text: str, kind: GrammarKind = GrammarKind.REGEX) -> Grammar:
    return Grammar(kind, text)


def test_the_same_grammar_is_compiled_once_and_every_matcher_begins_anew() -> None:
    backend = Counting()
    kept = GrammarCache(backend)
    kept.matcher(grammar("a")).advance([1, 2])
    assert kept.matcher(grammar("a")).tokens == []
    kept.matcher(grammar("a", GrammarKind.LARK))
    assert backend.compiled == ["a", "a"]


def test_what_was_not_used_longest_is_forgotten() -> None:
    backend = Counting()
    kept = GrammarCache(backend, max_grammars=3)
    for text in ["a", "b", "c", "a", "d", "b"]:
        kept.matcher(grammar(text))
    assert backend.compiled == ["a", "b", "c", "d", "b"]
    assert len(kept) == 3


def test_large_grammars_push_out_more() -> None:
    backend = Counting()
    kept = GrammarCache(backend, max_text=10)
    for text in ["aaaa", "bbbb", "cccccc", "bbbb", "a" * 11, "b"]:
        kept.matcher(grammar(text))
    assert backend.compiled == ["aaaa", "bbbb", "cccccc", "a" * 11, "b"]
    assert len(kept) == 1


def test_what_cannot_be_compiled_is_not_kept() -> None:
    backend = Counting()
    kept = GrammarCache(backend)
    for _ in range(2):
        with pytest.raises(GrammarError):
            kept.matcher(grammar("bad"))
    assert len(kept) == 0
