"""The reply to GetInternalStateReq: choices and cached prefixes, within its limits."""

import random
from array import array
from collections.abc import Iterator

import pytest

from tercet.protocol.messages.internal_state import ChoicePhase, PrefixRow
from tercet.scheduler.core import request_table
from tercet.scheduler.core.cache import prefix_cache
from tercet.scheduler.core.cache.prefix_cache import Node, RadixCache
from tercet.scheduler.core.config import CoreConfig
from tercet.scheduler.testing import Driver, request, small_capacity


def driver() -> Driver:
    return Driver(small_capacity(pages=64, page_size=4, slots=2), CoreConfig(token_budget=8))


def test_each_phase_of_a_choice_is_described() -> None:
    run = driver()
    run.send(request("a", [7, 3, 9, 4], max_new_tokens=9, ignore_eos=True, tenant="t"))
    run.step()
    run.send(request("b", range(1, 20), max_new_tokens=9, attempt=1), request("c", [1, 2], max_new_tokens=3))
    run.step()
    a, b, c = run.core.internal_state("s", now=5.0).choices
    assert (a.rid, a.tenant, a.phase, a.prompt_tokens, a.output_tokens) == ("a", "t", ChoicePhase.DECODE, 4, 2)
    assert (a.max_new_tokens, a.pages, a.shared_pages, a.age) == (9, 2, 1, 5.0)
    assert (b.rid, b.attempt, b.phase, b.prompt_tokens) == ("b", 1, ChoicePhase.PREFILL, 19)
    assert 0 < b.computed_tokens < 19
    assert (c.rid, c.phase, c.pages, c.output_tokens) == ("c", ChoicePhase.WAITING, 0, 0)


def test_the_load_is_that_of_heartbeats() -> None:
    run = driver()
    run.send(request("a", [7, 3, 9, 4], max_new_tokens=9, ignore_eos=True))
    run.step()
    state = run.core.internal_state("s", now=0.0)
    assert (state.id, state.load) == ("s", run.core.load())


def test_choices_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_table, "_MAX_WAITING_ROWS", 3)
    run = driver()
    for number in range(9):
        run.send(request(f"r{number}", [number, 5], max_new_tokens=9, ignore_eos=True))
    run.step()
    assert [each.rid for each in run.core.internal_state("s", now=0.0).choices] == ["r0", "r1", "r2", "r3", "r4"]


def nodes(cache: RadixCache) -> Iterator[Node]:
    known = [child for root in cache.roots.values() for child in root.children.values()]
    while known:
        node = known.pop()
        yield node
        known += node.children.values()


def filled(count: int, salts: int = 3) -> RadixCache:
    """Return a cache of random prefixes, which share beginnings."""
    chance = random.Random(3)
    cache = RadixCache(page_size=1)
    for _ in range(count):
        tokens = array("i", [chance.randrange(3) for _ in range(chance.randrange(1, 12))])
        cache.insert(str(chance.randrange(salts)), tokens.tobytes(), [list(range(len(tokens)))])
    return cache


def test_a_small_tree_is_described_whole() -> None:
    cache = filled(30)
    rows, known = cache.largest(), list(nodes(cache))
    assert sorted((row.pages, row.children) for row in rows) == sorted(
        (len(node.pages[0]), len(node.children)) for node in known
    )
    assert sum(row.pages for row in rows) == cache.cached
    for index, row in enumerate(rows):
        assert row.parent < index, "parents come first"
        assert row.children == sum(each.parent == index for each in rows)


def test_the_largest_nodes_of_a_wide_tree_are_described(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix_cache, "_MAX_ROWS", 4)
    cache = RadixCache(page_size=1)
    for number in range(50):
        size = (number * 7) % 50 + 1
        cache.insert("", array("i", [number] * size).tobytes(), [list(range(size))])
    assert [row.pages for row in cache.largest()] == [50, 49, 48, 47]


def test_a_huge_tree_is_searched_in_part(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix_cache, "_MAX_SEARCHED", 20)
    cache = RadixCache(page_size=1)
    for number in range(1000):
        cache.insert("", array("i", [number]).tobytes(), [[number]])
    assert len(cache.largest()) == 20


def test_describing_a_tree_changes_nothing() -> None:
    cache = filled(30)
    before = cache.unlocked, cache.version
    cache.largest()
    assert (cache.unlocked, cache.version) == before


def test_users_of_a_prefix_are_counted() -> None:
    cache = RadixCache(page_size=1)
    key = array("i", [1, 2, 3]).tobytes()
    cache.insert("", key, [[1, 2, 3]])
    cache.lock(cache.match("", key).node)
    assert cache.largest() == [PrefixRow(parent=-1, pages=3, users=1)]
