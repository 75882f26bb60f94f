"""Tests of the choice of a grid's cases for the ordinary run: `GRIDS` in the root's `conftest.py`, and `pairwise`."""

from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

from packages.kernels.tests.pairwise import pairwise

pytest_plugins = ["pytester"]

CONFTEST = Path(__file__).parents[3] / "conftest.py"
TESTS = """
import pytest


@pytest.fixture(params=["cpu", "cuda"])
def device(request):
    return request.param


@pytest.mark.parametrize("heads", [1, 2, 4])
@pytest.mark.parametrize(("rows", "tokens"), [(1, 16), (3, 1)])
def test_grid(device, heads, rows, tokens): ...


@pytest.mark.parametrize("heads", [1, 2, 4])
def test_one_parameter(heads): ...


@pytest.mark.parametrize(("rows", "tokens"), [(1, 1), (1, 2), (2, 1), (2, 2)])
def test_rows(rows, tokens): ...


@pytest.mark.slow
@pytest.mark.parametrize("heads", [1, 2])
def test_slow(heads, device): ...


def test_alone(): ...
"""


def quick(items: list[pytest.Item]) -> dict[str, list[dict[str, Any]]]:
    """Return the parameters of the cases that the ordinary run has, by test."""
    found: dict[str, list[dict[str, Any]]] = {}
    for item in items:
        assert isinstance(item, pytest.Function)
        if not item.get_closest_marker("slow"):
            found.setdefault(item.originalname, []).append(item.callspec.params if hasattr(item, "callspec") else {})
    return found


def test_a_grid_keeps_every_value_and_a_list_of_rows_stays_whole(
    pytester: pytest.Pytester, pytestconfig: pytest.Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    conftest: Any = pytestconfig.pluginmanager.get_plugin(str(CONFTEST))
    module = pytester.getmodulecol(TESTS, ["-o", "markers=slow", "-o", "asyncio_default_fixture_loop_scope=function"])
    items = pytester.genitems([module])
    conftest.pytest_collection_modifyitems(items)
    assert len(quick(items)["test_grid"]) == 12  # the file is in none of the folders
    monkeypatch.setattr(conftest, "GRIDS", ("test_a_grid",))
    conftest.pytest_collection_modifyitems(items)
    cases = quick(items)
    assert {name: len(each) for name, each in cases.items()} == {
        "test_grid": 3,
        "test_one_parameter": 3,
        "test_rows": 4,
        "test_alone": 1,
    }
    grid = cases["test_grid"]
    assert {case["device"] for case in grid} == {"cpu", "cuda"}
    assert {case["heads"] for case in grid} == {1, 2, 4}
    assert {(case["rows"], case["tokens"]) for case in grid} == {(1, 16), (3, 1)}


def test_pairwise_keeps_every_pair_of_values() -> None:
    options = ((1, 2, 3), ("a", "b"), (True, False))
    kept = {tuple(case.values) for case in pairwise(*options) if not case.marks}
    assert len(kept) < len(pairwise(*options)) == 12
    for first, second in combinations(range(3), 2):
        pairs = {(case[first], case[second]) for case in kept}
        assert len(pairs) == len(options[first]) * len(options[second])
