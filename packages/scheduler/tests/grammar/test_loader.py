"""Grammars are read beside the steps, once for all who follow them, and kept as long as anybody does."""

from collections.abc import Iterator
from concurrent.futures import Future
from threading import Event

import pytest

from packages.scheduler.tests.grammar.test_cache import Counting, Tape, grammar
from tercet.protocol.messages.values import Grammar
from tercet.scheduler.grammar import loader as desk
from tercet.scheduler.grammar.cache import GrammarCache
from tercet.scheduler.grammar.loader import GrammarLoader
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
    desk = GrammarLoader(cache)
    yield desk
    backend.let.set()
    desk.close()


def settle(reader: GrammarLoader, *grammars: Grammar) -> None:
    """Wait until they are read."""
    for each in grammars:
        reader.reading(each).exception(10)


def test_nobody_waits_for_a_grammar_and_it_is_told_once(reader: GrammarLoader, backend: Slow) -> None:
    assert not reader.want(A)
    assert not reader.want(A)
    assert reader.fault(A) == ""
    assert (reader.busy, reader.take_read()) == (True, [])
    backend.let.set()
    settle(reader, A)
    assert (reader.take_read(), reader.take_read(), reader.busy) == ([A], [], False)
    assert reader.fault(A) == reader.fault(B) == ""
    assert reader.want(A)
    assert backend.compiled == ["a"]


def test_every_copy_begins_anew(reader: GrammarLoader, backend: Slow) -> None:
    backend.let.set()
    reader.want(A)
    one = reader.copy(reader.reading(A))
    one.advance([1])
    assert isinstance(one, Tape)
    other = reader.copy(reader.reading(A))
    assert isinstance(other, Tape)
    assert (one.tokens, other.tokens) == ([1], [])


def test_what_the_cache_has_is_read_at_once(reader: GrammarLoader, backend: Slow, cache: GrammarCache[Tape]) -> None:
    backend.let.set()
    cache.matcher(A)
    assert reader.want(A)
    assert not reader.busy


def test_a_grammar_that_cannot_be_read_fails_where_it_is_followed(reader: GrammarLoader, backend: Slow) -> None:
    bad = grammar("bad")
    reader.want(bad)
    backend.let.set()
    settle(reader, bad)
    assert reader.take_read() == [bad]
    assert reader.fault(bad) == "bad"
    read: Future[object] = reader.reading(bad)  # type: ignore[assignment]
    assert isinstance(read.exception(), GrammarError)


def test_kept_is_what_is_wanted_whatever_else_comes(backend: Slow) -> None:
    reader = GrammarLoader(GrammarCache(backend, max_grammars=1))
    backend.let.set()
    for each in (A, B):
        reader.want(each)
        settle(reader, each)
    reader.keep([A])
    reader.want(C)
    settle(reader, C)
    assert reader.want(A)
    assert backend.compiled == ["a", "b", "c"]
    assert not reader.want(B)
    reader.close()


def test_too_many_wait_until_some_are_wanted_no_longer(
    reader: GrammarLoader, backend: Slow, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(desk, "MOST_READ", 1)
    for each in (A, B, C):
        reader.want(each)
    backend.let.set()
    settle(reader, A)
    assert reader.take_read() == [A]
    reader.keep([A, C])
    assert reader.take_read() == [B], "told of, because nobody waits for it any more"
    backend.let.clear()
    reader.keep([C])
    backend.let.set()
    settle(reader, C)
    assert reader.take_read() == [C]
    assert backend.compiled == ["a", "c"]
