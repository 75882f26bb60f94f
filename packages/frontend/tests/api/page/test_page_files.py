"""The page's files: types, caching, a strict content security policy, and a bound on their size."""

import re
from collections.abc import Callable
from pathlib import Path

import httpx2
import pytest

from tercet.frontend.api.page.files import DOCUMENTS, FOLDER
from tercet.frontend.config.config import HttpConfig
from tercet.frontend.testing import FakeEngine, Served, serving

EngineOf = Callable[..., FakeEngine]
HttpOf = Callable[[Served], httpx2.AsyncClient]

FILES = sorted(FOLDER.iterdir())
MAX_BYTES = 200_000
TYPES = {".html": "text/html", ".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}


def urls() -> dict[str, Path]:
    pages = {path: FOLDER / name for path, name in DOCUMENTS.items()}
    return pages | {f"/page/{path.name}": path for path in FILES}


async def test_every_file_is_served_without_a_key_and_only_once(engine_of: EngineOf, http_of: HttpOf) -> None:
    async with serving(engine_of(), HttpConfig(api_key=("user",))) as served:
        http = http_of(served)
        for url, path in urls().items():
            answer = await http.get(url)
            assert (answer.status_code, answer.content) == (200, path.read_bytes())
            assert answer.headers["content-type"].partition(";")[0] == TYPES[path.suffix]
            assert answer.headers["content-security-policy"].startswith("default-src 'self';")
            assert answer.headers["x-content-type-options"] == "nosniff"
            again = await http.get(url, headers={"if-none-match": f'"other", W/{answer.headers["etag"]}'})
            assert (again.status_code, again.content) == (304, b"")
            assert again.headers["etag"] == answer.headers["etag"]


async def test_a_page_needs_no_model(engine_of: EngineOf, http_of: HttpOf) -> None:
    async with serving(engine_of(), connect=False) as served:
        assert (await http_of(served).get("/")).status_code == 200


@pytest.mark.parametrize("name", ["nothing.js", "__init__.py", "..%2ffiles.py", "%2e%2e/files.py", ""])
async def test_other_files_are_not_served(engine_of: EngineOf, http_of: HttpOf, name: str) -> None:
    async with serving(engine_of()) as served:
        assert (await http_of(served).get(f"/page/{name}")).status_code == 404


async def test_a_server_without_the_page_lacks_its_routes(engine_of: EngineOf, http_of: HttpOf) -> None:
    async with serving(engine_of(), HttpConfig(page=False)) as served:
        http = http_of(served)
        assert {(await http.get(url)).status_code for url in urls()} == {404}
        assert (await http.get("/openapi.json")).status_code == 200


def test_the_page_is_small() -> None:
    assert sum(path.stat().st_size for path in FILES) < MAX_BYTES


def test_documents_have_no_inline_code_and_name_only_their_own_files() -> None:
    for name in DOCUMENTS.values():
        text = (FOLDER / name).read_text(encoding="utf-8")
        assert re.findall(r"<script(?![^>]*\bsrc=)[^>]*>|<style|\sstyle=|\son\w+=", text) == []
        linked = re.findall(r"""\b(?:src|href)=["']([^"'#]+)["']""", text)
        assert {each for each in linked if f"/{each}" not in urls() and each != "./"} <= {"openapi.json"}


def test_scripts_write_no_html_and_reach_no_other_host() -> None:
    """Text of models reaches the page by `textContent` alone."""
    for path in FILES:
        if path.suffix == ".js":
            text = path.read_text(encoding="utf-8")
            assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|DOMParser|\beval\(", text)
            assert not re.search(r"localStorage|sessionStorage|indexedDB|document\.cookie", text)
            assert re.findall(r"https?://(?!www\.w3\.org/)\S+", text) == []
