"""The way of one streamed chat request, as docs/design/request.md lists it: short, and connected by imports."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "design" / "request.md"
MOST_FILES = 40
MOST_LINES = 8500
WIRING = (
    "frontend/wiring.py",
    "scheduler/wiring.py",
    "scheduler/core/data_parallel/scheduler.py",
    "scheduler/executor_factory.py",
    "detokenizer/__main__.py",
    "protocol/aio.py",
)
"""Files that put the parts of the way together. Every listed file is imported by one of these or by a listed file."""


def source(name: str) -> Path:
    return ROOT / "packages" / name.partition("/")[0] / "src" / "tercet" / name


def rows() -> list[list[str]]:
    """Return the cells of the page's tables."""
    return [line.split("|")[1:-1] for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("| ")]


def files_in(cell: str) -> list[str]:
    return re.findall(r"`([\w/]+\.py)`", cell)


def way() -> list[str]:
    """Return the files in the first column of the page's tables."""
    return [name for row in rows() for name in files_in(row[0])]


def helpers() -> list[str]:
    """Return the files in the second column of the last table."""
    return [name for row in rows() if not files_in(row[0]) for name in files_in(row[1])]


def lines_of(name: str) -> int:
    return len(source(name).read_text(encoding="utf-8").splitlines())


def imports(name: str) -> set[str]:
    """Return the files of this project that a file imports, also inside functions and for type checking."""
    found = set()
    for node in ast.walk(ast.parse(source(name).read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("tercet."):
            module = node.module.removeprefix("tercet.").replace(".", "/")
            found |= {f"{module}.py", *(f"{module}/{alias.name}.py" for alias in node.names)}
    return found


def test_each_file_is_listed_once_and_exists() -> None:
    names = [*way(), *helpers()]
    assert len(names) == len(set(names))
    assert [name for name in names if not source(name).is_file()] == []


def test_the_way_is_short() -> None:
    assert len(way()) <= MOST_FILES
    assert sum(map(lines_of, way())) <= MOST_LINES


def test_the_page_says_how_long_the_way_is() -> None:
    match = re.search(r"(\d+) files\s+and\s+([\d,]+)\s+lines", PAGE.read_text(encoding="utf-8"))
    assert match is not None
    assert int(match[1]) == len(way())
    assert abs(int(match[2].replace(",", "")) - sum(map(lines_of, way()))) <= 100


def test_every_file_is_reached_by_imports() -> None:
    reached: set[str] = set()
    new = set(WIRING)
    while new:
        new = {found for name in new for found in imports(name)} & set(way()) - reached
        reached |= new
    assert set(way()) - reached == set()


def test_helpers_are_imported_by_the_way_or_by_helpers() -> None:
    imported = {found for name in [*way(), *helpers(), *WIRING] for found in imports(name)}
    assert set(helpers()) - imported == set()
