"""The pages of `docs/`: complete navigation, working links, existing files, current tables."""

import re
import unicodedata
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tools.docs_pages import TABLES, outdated

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
OTHERS = [ROOT / name for name in ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md")]
OTHERS += [*sorted(ROOT.glob("packages/*/README.md")), *sorted(ROOT.glob("benchmarks/**/README.md"))]
NAMING_FILES = [*DOCS.glob("design/*.md"), *DOCS.glob("contributing/add-*.md"), *OTHERS[1:-2]]
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")


def prose(path: Path) -> str:
    """Return a page without code blocks."""
    return re.sub(r"^```.*?^```$", "", path.read_text(), flags=re.MULTILINE | re.DOTALL)


def anchors(path: Path) -> set[str]:
    """Return the anchors of a page's headings, as Python-Markdown makes them."""
    found = set()
    for heading in re.findall(r"^#+ +(.+?) *$", prose(path), re.MULTILINE):
        text = unicodedata.normalize("NFKD", heading.replace("`", "")).encode("ascii", "ignore").decode()
        found.add(re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", text).strip().lower()))
    return found


def entries(nav: Any) -> Iterator[str]:
    """Yield the pages of mkdocs' navigation."""
    for entry in nav:
        for target in entry.values():
            if isinstance(target, str):
                yield target
            else:
                yield from entries(target)


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def test_the_navigation_has_every_page_once() -> None:
    nav = list(entries(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]))
    assert sorted(nav) == sorted(str(page.relative_to(DOCS)) for page in PAGES)


@pytest.mark.parametrize("page", [*PAGES, *OTHERS], ids=name_of)
def test_relative_links_and_anchors_resolve(page: Path) -> None:
    for link in LINK.findall(prose(page)):
        if re.match(r"[a-z]+:", link):
            continue
        target, _, anchor = link.partition("#")
        path = (page.parent / target).resolve() if target else page
        assert path.exists(), link
        assert not (page in PAGES and DOCS not in path.parents), f"{link} leaves docs/, which a site cannot"
        assert not anchor or anchor in anchors(path), link


@pytest.fixture(scope="module")
def files() -> str:
    """Return the paths of the files in all packages, one a line."""
    return "\n".join(map(str, ROOT.glob("packages/*/**/*.*"))) + "\n"


@pytest.mark.parametrize("page", NAMING_FILES, ids=name_of)
def test_files_that_a_page_names_exist(page: Path, files: str) -> None:
    for name in set(re.findall(r"`([\w/.]+\.(?:py|cpp|h))`", prose(page))):
        assert f"/{name}\n" in files or (ROOT / name).exists() or "NAME" in name, name


def test_every_generated_table_has_a_place() -> None:
    places = [name for page in PAGES for name in re.findall(r"<!-- generated: ([\w.-]+) -->", page.read_text())]
    assert sorted(places) == sorted(TABLES)


def test_generated_tables_are_up_to_date() -> None:
    assert [name_of(path) for path, _ in outdated()] == [], "run `python -m tools.docs_pages`"


def test_the_readme_is_short() -> None:
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) <= 150
    assert len(text.split()) <= 1000


@pytest.mark.parametrize("page", sorted(ROOT.glob("packages/*/README.md")), ids=name_of)
def test_a_package_readme_is_short(page: Path) -> None:
    assert len(page.read_text().splitlines()) <= 45


def test_the_architecture_page_names_every_folder() -> None:
    text = (ROOT / "ARCHITECTURE.md").read_text()
    folders = {each.parent.name for each in ROOT.glob("packages/*/src/tercet/*/*/**/__init__.py")}
    assert [name for name in sorted(folders) if f"{name}/`" not in text] == []


def test_the_files_that_the_architecture_page_names_exist() -> None:
    names = re.findall(
        r"`((?:frontend|scheduler|detokenizer|kernels|protocol)/[\w/]+\.py)`", (ROOT / "ARCHITECTURE.md").read_text()
    )
    assert len(names) > 50
    assert [name for name in names if not [*ROOT.glob(f"packages/*/src/tercet/{name}")]] == []
