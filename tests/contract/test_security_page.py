"""docs/security.md names a test for every row, and each of them exists."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "security.md").read_text()
TABLES = PAGE.partition("## What happens, and where it is tested")[2]
ROWS = [line.split(" | ") for line in TABLES.splitlines() if re.match(r"\| (?!attack|fault)", line)]
CITED = re.compile(r"`([\w/]+\.py)::(\w+)`")


@pytest.mark.parametrize("row", ROWS, ids=lambda row: str(row[0])[2:60])
def test_every_row_names_tests_that_exist(row: list[str]) -> None:
    cited = CITED.findall(row[-1])
    assert len(row) == 3
    assert cited
    for file, test in cited:
        part, _, rest = file.partition("/")
        path = ROOT / file if part == "tests" else ROOT / "packages" / part / "tests" / rest
        assert re.search(rf"^(async )?def {test}\(", path.read_text(), re.MULTILINE), f"{file} has no {test}"


def test_rows_are_found() -> None:
    assert len(ROWS) > 40
