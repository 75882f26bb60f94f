"""Grids of options, of which the ordinary run tests a part."""

from collections.abc import Sequence
from itertools import combinations, product
from typing import Any

import pytest

Pair = tuple[tuple[int, Any], tuple[int, Any]]


def pairwise(*options: Sequence[Any]) -> list[Any]:
    """Return every combination of values for `parametrize`; those beyond the pairs are slow."""
    cases = list(product(*(range(len(values)) for values in options)))
    missing = set[Pair]().union(*map(_pairs, cases))
    needed = set[tuple[int, ...]]()
    while missing:
        best = max(cases, key=lambda case: len(missing & _pairs(case)))
        needed.add(best)
        missing -= _pairs(best)
    return [
        pytest.param(
            *(values[place] for values, place in zip(options, case, strict=True)),
            marks=() if case in needed else pytest.mark.slow,
        )
        for case in cases
    ]


def alternating(first: Sequence[Any], second: Sequence[Any]) -> list[Any]:
    """Return every combination of two that hardly depend on one another; every other one is slow."""
    return [
        pytest.param(one, other, marks=() if (row + column) % 2 == 0 else pytest.mark.slow)
        for row, one in enumerate(first)
        for column, other in enumerate(second)
    ]


def _pairs(case: tuple[int, ...]) -> set[Pair]:
    return set(combinations(enumerate(case), 2))
