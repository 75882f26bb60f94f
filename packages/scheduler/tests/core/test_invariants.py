"""Invariants of the core: pages that are lost or shared are reported."""

from collections.abc import Callable

import pytest

from tercet.scheduler.core.cache.page_pools import PagePool
from tercet.scheduler.core.invariants import violations
from tercet.scheduler.testing import Driver, request, small_capacity

LISTS_DISAGREE = "group 0: the free list and the holders disagree"
NOT_FOUND = "group 0: pages whose holders are not found, or more than counted"


def lose(pool: PagePool) -> None:
    pool.free_pages.pop()


def free_twice(pool: PagePool) -> None:
    pool.free_pages.append(pool.free_pages[0])


def free_in_use(pool: PagePool) -> None:
    pool.free_pages.append(next(page for page, count in enumerate(pool.holders) if count))


def count_once_more(pool: PagePool) -> None:
    pool.holders[next(page for page, count in enumerate(pool.holders) if count)] += 1


@pytest.mark.parametrize(
    ("damage", "found"),
    [
        (lose, [LISTS_DISAGREE]),
        (free_twice, [LISTS_DISAGREE]),
        (free_in_use, [LISTS_DISAGREE]),
        (count_once_more, [NOT_FOUND]),
    ],
)
def test_pages_that_are_miscounted_are_reported(damage: Callable[[PagePool], None], found: list[str]) -> None:
    run = Driver(small_capacity())
    run.send(request("a", [*range(9)], max_new_tokens=4, ignore_eos=True))
    run.step()
    assert violations(run.core) == []
    damage(run.core.memory.pools.groups[0])
    assert violations(run.core) == found
