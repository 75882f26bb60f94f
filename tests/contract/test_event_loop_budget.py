"""The files and tests named on the page of event loop budgets exist."""

import re
from pathlib import Path

import pytest

_ROOT = Path(__file__).parents[2]
_ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in (_ROOT / "docs/design/event-loop-budget.md").read_text().splitlines()
    if line.startswith("| ") and not line.startswith("| piece of work")
]


def test_there_are_rows_for_every_part() -> None:
    assert len(_ROWS) >= 35
    assert {len(row) for row in _ROWS} == {5}


@pytest.mark.parametrize("row", _ROWS, ids=lambda row: row[0])
def test_a_row_names_a_bound_and_where_it_is_kept_and_tested(row: list[str]) -> None:
    _, _, bound, where, test = row
    assert bound
    for cell, folder in ((where, "src"), (test, "tests")):
        names = re.findall(r"`([\w/.]+)`", cell)
        assert names
        for name in names:
            found = list(_ROOT.glob(f"packages/*/{folder}/**/{name}"))
            assert found, f"there is no {name}"
