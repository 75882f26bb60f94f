"""The middleware holds for any request head."""

import asyncio
from collections.abc import Callable

import httpx2
import pytest

from tercet.frontend.config.config import HttpConfig
from tercet.frontend.testing import FakeEngine, Served, serving

EngineOf = Callable[..., FakeEngine]
HttpOf = Callable[[Served], httpx2.AsyncClient]
OPEN = {"/health", "/live", "/", "/docs"}
KEYS = HttpConfig(api_key=("user",), admin_key=("boss",))


async def status(served: Served, head: bytes) -> int:
    """Return the status of the response to a head that no client library would send."""
    reader, writer = await asyncio.open_connection("127.0.0.1", int(served.url.rpartition(":")[2]))
    try:
        writer.write(head + b"\r\nconnection: close\r\n\r\n")
        async with asyncio.timeout(10):
            return int((await reader.read()).split()[1])
    finally:
        writer.close()


@pytest.mark.parametrize("host", [b"x/health?", b"x/live#", b"x/health/?a=", b"/live", b"x:1/metrics?", b"", b"a b"])
async def test_a_host_header_opens_no_route(engine_of: EngineOf, host: bytes) -> None:
    """A URL built from Host and path may have another path; only the routed path counts."""
    async with serving(engine_of(), HttpConfig(api_key=("user",), open_metrics=True)) as served:
        assert await status(served, b"GET /server_info HTTP/1.1\r\nhost: " + host) == 401
        assert await status(served, b"GET /live HTTP/1.1\r\nhost: x/server_info?" + host) == 200


@pytest.mark.parametrize("host", [b"[", b"[x", b"x:y:z", b"\xff"])
async def test_a_host_that_is_none_is_no_fault_of_ours(engine_of: EngineOf, host: bytes) -> None:
    async with serving(engine_of()) as served:
        assert await status(served, b"GET /nowhere HTTP/1.1\r\nhost: " + host) == 404


@pytest.mark.parametrize("target", [b"http://x/live?/server_info", b"http://x/server_info", b"/live/../server_info"])
async def test_neither_does_a_strange_target(engine_of: EngineOf, target: bytes) -> None:
    async with serving(engine_of(), KEYS) as served:
        expected = 200 if target.startswith(b"http://x/live?") else 401
        assert await status(served, b"GET " + target + b" HTTP/1.1\r\nhost: x") == expected


@pytest.mark.parametrize("key", [None, "user", "boss"])
async def test_no_answer_lets_a_page_of_another_origin_read_it(
    engine_of: EngineOf, http_of: HttpOf, key: str | None
) -> None:
    asks = {"origin": "https://elsewhere.example"}
    preflight = {"access-control-request-method": "POST", "access-control-request-headers": "authorization"}
    shown = {"authorization": f"Bearer {key}"} if key else {}
    body = {"model": "tiny", "prompt": "hello"}
    async with serving(engine_of(), KEYS) as served:
        http = http_of(served)
        answers = [
            await http.options("/v1/completions", headers=asks | preflight | shown),
            await http.options("/health", headers=asks | preflight | shown),
            await http.get("/live", headers=asks | shown),
            await http.get("/nowhere", headers=asks | shown),
            await http.post("/v1/completions", json=body, headers=asks | shown),
            await http.post("/v1/completions", json=body | {"stream": True}, headers=asks | shown),
        ]
    assert [each.status_code for each in answers] == (
        [405, 405, 200, 404, 200, 200] if key else [401, 405, 200] + [401] * 3
    )
    assert not [name for each in answers for name in each.headers if name.startswith("access-control-")]


async def test_an_error_does_not_say_again_all_that_was_sent(engine_of: EngineOf, http_of: HttpOf) -> None:
    long = "x" * 1_000_000
    async with serving(engine_of()) as served:
        http = http_of(served)
        unknown = await http.post("/v1/completions", json={"model": long, "prompt": "hello"})
        strange = await http.post("/v1/completions", json={"model": "tiny", "prompt": "hello", long: 1})
    for answer in (unknown, strange):
        assert answer.status_code == 400
        assert len(answer.content) < 5000
        assert answer.json()["error"]["message"]
    assert len(strange.json()["error"]["param"]) == 256


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data", None])
async def test_what_a_page_may_send_without_asking_first_is_not_read(
    engine_of: EngineOf, http_of: HttpOf, kind: str | None
) -> None:
    """The server needs no key, and browsers withhold only the response from pages of other origins."""
    headers = {"origin": "https://elsewhere.example"} | ({} if kind is None else {"content-type": kind})
    content = b'{"model": "tiny", "text": "hello", "input": "hello", "lora_name": "a", "lora_path": "/a", "rid": "a"}'
    async with serving(engine_of()) as served:
        http = http_of(served)
        for path in ("/generate", "/v1/completions", "/v1/responses", "/abort_request", "/open_session"):
            assert (await http.post(path, content=content, headers=headers)).status_code == 415
        for path in ("/flush_cache", "/pause_generation", "/load_lora_adapter", "/update_weights_from_disk"):
            assert (await http.post(path, content=content, headers=headers)).status_code == 403
        assert not served.engine.requests()


async def test_every_route_wants_a_key_but_those_that_are_open(engine_of: EngineOf, http_of: HttpOf) -> None:
    """New routes need a key unless they are listed as open."""
    async with serving(engine_of(), KEYS) as served:
        http = http_of(served)
        paths = (await http.get("/openapi.json", headers={"x-api-key": "user"})).json()["paths"]
        asked = [(method.upper(), path) for path, methods in paths.items() for method in methods]
        answers = {each: (await http.request(*each, json={})).status_code for each in asked}
        wrong = {each: (await http.request(*each, json={}, headers={"x-api-key": "x"})).status_code for each in asked}
    assert len(asked) > 30
    assert answers == wrong
    assert {path for (_, path), status in answers.items() if status != 401} == OPEN
