"""Routes of OpenAI's and Anthropic's clients that this server lacks: 404, in the format of the client."""

import re
from collections.abc import Callable
from pathlib import Path

import anthropic
import httpx2
import openai
import pytest

from tercet.frontend.api.docs.operations import OPERATIONS
from tercet.frontend.config.config import HttpConfig
from tercet.frontend.testing import FakeEngine, Served, serving

EngineOf = Callable[..., FakeEngine]
HttpOf = Callable[[Served], httpx2.AsyncClient]
CALL = re.compile(r'self\._(get|post|put|patch|delete|get_api_list)\(\s*(?:path_template\(\s*)?f?"(/[^"?]*)')
OURS = {(method, re.sub(r"{[^}]*}", "x", path)) for method, path in OPERATIONS}
ANTHROPIC = {"anthropic-version": "2023-06-01"}


def routes(package: str | None, prefix: str = "") -> set[tuple[str, str]]:
    """Return method and path of every call in a client's resources, with `x` for each parameter."""
    assert package is not None
    calls = [
        call for file in (Path(package).parent / "resources").rglob("*.py") for call in CALL.findall(file.read_text())
    ]
    return {
        ("GET" if name == "get_api_list" else name.upper(), prefix + re.sub(r"{[^}]*}", "x", path))
        for name, path in calls
    }


async def test_absent_routes_of_openai_are_404s_with_an_error(engine_of: EngineOf, http_of: HttpOf) -> None:
    absent = routes(openai.__file__, "/v1") - OURS
    named = {
        ("POST", "/v1/responses/compact"),
        ("DELETE", "/v1/models/x"),
        ("GET", "/v1/files"),
        ("POST", "/v1/batches"),
    }
    assert named < absent
    async with serving(engine_of()) as served:
        http = http_of(served)
        for method, path in sorted(absent):
            if path.startswith("/v1/chat/completions"):
                continue
            answer = await http.request(method, path, json={} if method != "GET" else None)
            assert answer.status_code == 404, (method, path, answer.text)
            assert answer.json()["error"].keys() == {"message", "type", "param", "code"}, path
            assert answer.json()["error"]["type"] == "invalid_request_error"


async def test_absent_routes_of_anthropic_are_404s_in_its_format(engine_of: EngineOf, http_of: HttpOf) -> None:
    absent = routes(anthropic.__file__) - OURS
    assert {("POST", "/v1/messages/batches"), ("GET", "/v1/models/x/y")} & absent or len(absent) > 10
    async with serving(engine_of()) as served:
        http = http_of(served)
        for method, path in sorted(absent):
            answer = await http.request(method, path, headers=ANTHROPIC, json={} if method != "GET" else None)
            assert answer.status_code == 404, (method, path, answer.text)
            assert answer.json()["type"] == "error", path
            assert answer.json()["error"]["type"] == "not_found_error"
            assert answer.headers["request-id"] == answer.json()["request_id"]


@pytest.mark.parametrize(("headers", "keys"), [(ANTHROPIC, {"type", "error", "request_id"}), ({}, {"error"})])
async def test_errors_before_the_route_is_known_have_the_format_of_the_client(
    engine_of: EngineOf, http_of: HttpOf, headers: dict[str, str], keys: set[str]
) -> None:
    async with serving(engine_of(), HttpConfig(api_key=("k",))) as served:
        http = http_of(served)
        unknown = await http.get("/v1/skills", headers=headers)
        known = await http.post("/v1/chat/completions", json={}, headers={**headers, "authorization": "Bearer k"})
    assert (unknown.status_code, unknown.json().keys()) == (401, keys)
    assert (known.status_code, known.json().keys()) == (400, {"error"})
