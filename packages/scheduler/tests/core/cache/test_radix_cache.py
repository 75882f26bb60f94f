"""The tree against a naive model: a dict from page-aligned prefixes to pages."""

import random
from array import array
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from tercet.scheduler.core.cache.prefix_cache import RadixCache


def key(*tokens: int) -> bytes:
    return array("i", tokens).tobytes()


def test_a_prefix_is_found_in_whole_pages() -> None:
    cache = RadixCache(page_size=2)
    cache.insert("", key(1, 2, 3, 4, 5, 6), [[10, 11, 12]])
    assert cache.match("", key(1, 2, 3, 4, 9, 9)).pages == [[10, 11]]
    assert cache.match("", key(1, 2, 3, 9)).pages == [[10]]
    assert cache.match("", key(1, 9)).pages == [[]]
    assert cache.match("", key(1, 2, 3, 4, 5, 6, 7)).count == 3


def test_salts_never_meet() -> None:
    cache = RadixCache(page_size=1)
    cache.insert("a", key(1, 2), [[10, 11]])
    assert cache.measure("b", key(1, 2)) == 0
    assert cache.measure("", key(1, 2)) == 0
    assert cache.measure("a", key(1, 2)) == 2


def test_an_empty_namespace_costs_nothing() -> None:
    cache = RadixCache(page_size=1)
    for number in range(100):
        match = cache.match(f"salt-{number}", key(1))
        cache.lock(match.node)
        cache.unlock(match.node)
    assert cache.roots == {}


def test_the_least_recently_used_leaf_goes_first() -> None:
    cache = RadixCache(page_size=1)
    cache.insert("", key(1, 2), [[10, 11]])
    cache.insert("", key(1, 3), [[10, 12]])
    cache.insert("", key(4), [[13]])
    cache.match("", key(1, 2))
    assert cache.evict(1) == [[12]]
    assert cache.evict(1) == [[13]]
    assert cache.evict(5) == [[11, 10]]
    assert cache.cached == 0


def test_a_leaf_is_cut_where_part_of_it_is_enough() -> None:
    cache = RadixCache(page_size=1)
    cache.insert("", key(*range(100)), [list(range(100))])
    assert cache.evict(30) == [list(range(70, 100))]
    assert cache.match("", key(*range(100))).count == 70


def test_a_long_leaf_is_cut_a_few_times_however_few_pages_are_wanted() -> None:
    cache = RadixCache(page_size=1)
    cache.insert("", key(*range(6400)), [list(range(6400))])
    assert cache.evict(1) == [list(range(6300, 6400))]
    assert cache.cached == cache.evictable == cache.match("", key(*range(6400))).count == 6300
    cuts = 0
    while cache.cached:
        cache.evict(1)
        cuts += 1
    assert cuts < 500


class Watched(bytes):
    """An edge, and how many bytes of it were copied."""

    copied = 0

    def __getitem__(self, part: Any) -> Any:
        cut = super().__getitem__(part)
        self.copied += len(cut)
        return cut


def test_to_find_where_a_key_leaves_a_long_edge_copies_it_once_or_twice() -> None:
    cache = RadixCache(page_size=1)
    leaf = cache.insert("", key(*range(5000)), [list(range(5000))]).node
    edge = leaf.key = Watched(leaf.key)
    for shared in (1, 2, 2500, 4321, 4999):
        edge.copied = 0
        assert cache.measure("", key(*range(shared), *[9999] * 5000)) == shared
        assert edge.copied <= 2 * len(edge)


def test_locked_paths_stay() -> None:
    cache = RadixCache(page_size=1)
    node = cache.insert("", key(1, 2, 3), [[10, 11, 12]]).node
    cache.insert("", key(1, 2, 4), [[10, 11, 13]])
    cache.lock(node)
    assert cache.evictable == 1
    assert cache.evict(10) == [[13]]
    cache.unlock(node)
    assert sorted(cache.evict(10)[0]) == [10, 11, 12]


def test_insert_says_what_it_had_and_keeps_only_the_rest() -> None:
    cache = RadixCache(page_size=1)
    cache.insert("", key(1, 2), [[10, 11]])
    inserted = cache.insert("", key(1, 2, 3), [[20, 21, 22]])
    assert inserted.existing == 2
    assert cache.match("", key(1, 2, 3)).pages == [[10, 11, 22]]


def test_every_cache_group_has_its_own_pages() -> None:
    cache = RadixCache(page_size=1, groups=2)
    cache.insert("", key(1, 2), [[10, 11], [50, 51]])
    assert cache.match("", key(1, 3)).pages == [[10], [50]]
    freed = cache.evict(2)
    assert [sorted(group) for group in freed] == [[10, 11], [50, 51]]


@given(seed=st.integers(0, 2**32), page_size=st.sampled_from([1, 2, 3]))
@settings(max_examples=60, deadline=None)
def test_random_use_agrees_with_a_dict(seed: int, page_size: int) -> None:
    chance = random.Random(seed)
    cache = RadixCache(page_size)
    model: dict[tuple[int, ...], int] = {}
    locked: list[tuple[object, tuple[int, ...]]] = []
    next_page = 0
    for _ in range(120):
        tokens = tuple(chance.randrange(3) for _ in range(chance.randrange(14)))
        whole = len(tokens) // page_size
        known = 0
        while known < whole and tokens[: (known + 1) * page_size] in model:
            known += 1
        assert cache.measure("", key(*tokens)) == known
        match chance.randrange(4):
            case 0:
                found = cache.match("", key(*tokens))
                assert found.pages == [[model[tokens[: (i + 1) * page_size]] for i in range(known)]]
            case 1:
                pages = list(range(next_page, next_page + whole))
                next_page += whole
                assert cache.insert("", key(*tokens[: whole * page_size]), [pages]).existing == known
                for i in range(known, whole):
                    model[tokens[: (i + 1) * page_size]] = pages[i]
            case 2:
                found = cache.match("", key(*tokens))
                cache.lock(found.node)
                locked.append((found.node, tokens[: known * page_size]))
                if len(locked) > 3:
                    cache.unlock(locked.pop(0)[0])  # type: ignore[arg-type]
            case 3:
                freed = set(cache.evict(chance.randrange(6))[0])
                gone = {prefix for prefix, page in model.items() if page in freed}
                assert len(gone) == len(freed)
                assert not any(prefix == kept[: len(prefix)] for prefix in gone for _, kept in locked)
                for prefix in gone:
                    del model[prefix]
                assert all(prefix[:-page_size] in model for prefix in model if len(prefix) > page_size)
    assert cache.cached == len(model)
