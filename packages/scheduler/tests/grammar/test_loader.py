"""Grammars are read beside the steps, once for all who follow them, and kept as long as anybody does."""

from collections.abc import Iterator
from concurrent.futures import Future
from threading import Event

import pytest

from packages.scheduler.tests.grammar.test_cache import Counting, Tape, grammar
from tercet.protocol.messages.values import Grammar
from tercet.scheduler.grammar.cache import GrammarCache, GrammarLoader, grammar_loader
from tercet.scheduler.grammar.port import GrammarError

A, B, C = grammar("a"), grammar("b"), grammar("c")


class Slow(Counting):
    """Compiles nothing until it is let."""

    def __init__(self) -> None:
        super().__init__()
        self.let = Event()

    def compile(self, grammar: Grammar) -> Tape:
        assert self.let.wait(10)
        return super().compile(grammar)


@pytest.fixture
def backend() -> Slow:
    return Slow()


@pytest.fixture
def cache(backend: Slow) -> GrammarCache[Tape]:
    return GrammarCache(backend)


@pytest.fixture
def reader(backend: Slow, cache: GrammarCache[Tape]) -> Iterator[GrammarLoader]:
    loader = grammar_loader(cache)
    yield loader
    backend.let.set()
    loader.close()


def settle(reader: GrammarLoader, *grammars: Grammar) -> None:
    """Wait until they are read."""
    for each in grammars:
        reader.get(each).exception(10)


def test_nobody_waits_for_a_grammar_and_it_is_told_once(reader: GrammarLoader, backend: Slow) -> None:
    assert not reader.request(A)
    assert not reader.request(A)
    assert reader.error_of(A) == ""
    assert (reader.busy, reader.pop_loaded()) == (True, [])
    backend.let.set()
    settle(reader, A)
    assert (reader.pop_loaded(), reader.pop_loaded(), reader.busy) == ([A], [], False)
    assert reader.error_of(A) == reader.error_of(B) == ""
    assert reader.request(A)
    assert backend.compiled == ["a"]


def test_every_copy_begins_anew(reader: GrammarLoader, backend: Slow) -> None:
    backend.let.set()
    reader.request(A)
    one = reader.get(A).result().copy()
    one.advance([1])
    assert isinstance(one, Tape)
    other = reader.get(A).result().copy()
    assert isinstance(other, Tape)
    assert (one.tokens, other.tokens) == ([1], [])


def test_what_the_cache_has_is_read_at_once(reader: GrammarLoader, backend: Slow, cache: GrammarCache[Tape]) -> None:
    backend.let.set()
    cache.matcher(A)
    assert reader.request(A)
    assert not reader.busy


def test_a_grammar_that_cannot_be_read_fails_where_it_is_followed(reader: GrammarLoader, backend: Slow) -> None:
    bad = grammar("bad")
    reader.request(bad)
    backend.let.set()
    settle(reader, bad)
    assert reader.pop_loaded() == [bad]
    assert reader.error_of(bad) == "bad"
    read: Future[object] = reader.get(bad)  # type: ignore[assignment]
    assert isinstance(read.exception(), GrammarError)


def test_kept_is_what_is_wanted_whatever_else_comes(backend: Slow) -> None:
    reader = grammar_loader(GrammarCache(backend, max_grammars=1))
    backend.let.set()
    for each in (A, B):
        reader.request(each)
        settle(reader, each)
    reader.pop_loaded()
    reader.retain([A])
    reader.request(C)
    settle(reader, C)
    assert reader.request(A)
    assert backend.compiled == ["a", "b", "c"]
    assert not reader.request(B)
    reader.close()


def test_too_many_wait_until_some_are_wanted_no_longer(reader: GrammarLoader, backend: Slow) -> None:
    reader._most = 1
    for each in (A, B, C):
        reader.request(each)
    backend.let.set()
    settle(reader, A)
    assert reader.pop_loaded() == [A]
    reader.retain([A, C])
    assert reader.pop_loaded() == [B], "told of, because nobody waits for it any more"
    backend.let.clear()
    reader.retain([C])
    backend.let.set()
    settle(reader, C)
    assert reader.pop_loaded() == [C]
    assert backend.compiled == ["a", "c"]
