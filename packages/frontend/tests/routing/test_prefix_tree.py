"""Prefix tree compared with a list of all keys, and its LRU eviction."""

from hypothesis import given, settings
from hypothesis import strategies as st

from tercet.frontend.routing.prefix_tree import PrefixTree
from tercet.protocol.messages.values import pack_ints

Key = tuple[str, tuple[int, ...]]

tokens = st.lists(st.integers(0, 2), max_size=12).map(tuple)
keys = st.tuples(st.sampled_from(["", "salt"]), tokens)


def shared(one: tuple[int, ...], other: tuple[int, ...]) -> int:
    return next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def found(seen: list[Key], key: Key) -> int:
    """Return the longest prefix of a key among all keys of its salt."""
    return max((shared(ids, key[1]) for salt, ids in seen if salt == key[0]), default=0)


def size(seen: list[Key]) -> int:
    """Return the number of tokens in a tree of all keys: their distinct prefixes."""
    return len({(salt, ids[:end]) for salt, ids in seen for end in range(1, len(ids) + 1)})


@given(seen=st.lists(keys, max_size=20), asked=st.lists(keys, max_size=8))
@settings(max_examples=300)
def test_it_finds_what_a_list_of_everything_finds(seen: list[Key], asked: list[Key]) -> None:
    tree = PrefixTree(1000)
    for count, (salt, ids) in enumerate(seen, 1):
        tree.insert(salt, pack_ints(ids))
        assert tree.tokens == size(seen[:count])
    for key in asked + seen:
        assert tree.match(key[0], pack_ints(key[1])) == found(seen, key)


@given(seen=st.lists(keys, max_size=60), capacity=st.integers(0, 40))
@settings(max_examples=300)
def test_a_full_one_keeps_what_was_used_last(seen: list[Key], capacity: int) -> None:
    tree = PrefixTree(capacity)
    for count, (salt, ids) in enumerate(seen, 1):
        tree.insert(salt, pack_ints(ids))
        assert tree.tokens <= capacity
        recent: list[Key] = []
        for key in reversed([(salt, ids[:capacity]) for salt, ids in seen[:count]]):
            if size([*recent, key]) > capacity:
                break
            recent.append(key)
        for salt, ids in recent:
            assert tree.match(salt, pack_ints(ids)) == len(ids)
        for key in seen:
            assert tree.match(key[0], pack_ints(key[1])) <= found(seen[:count], key)


def test_what_cannot_be_held_is_cut() -> None:
    tree = PrefixTree(4)
    tree.insert("", pack_ints(range(10)))
    assert (tree.match("", pack_ints(range(10))), tree.tokens) == (4, 4)


def test_it_does_not_grow_with_what_is_only_repeated_or_forgotten() -> None:
    tree = PrefixTree(64)
    for number in range(10_000):
        tree.insert(str(number % 7), pack_ints([number % 50, *range(9)]))
    assert tree.tokens <= 64
    assert len(tree._leaves) < 300
    assert len(tree._roots) <= 7
