"""CORS headers: the origins whose pages may read responses."""

from collections.abc import Callable

import httpx2
import pytest

from tercet.frontend.config.config import HttpConfig
from tercet.frontend.testing import FakeEngine, Served, serving

EngineOf = Callable[..., FakeEngine]
HttpOf = Callable[[Served], httpx2.AsyncClient]

PAGE = "https://chat.example.org"
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}]}
ASKED_FIRST = {
    "origin": PAGE,
    "access-control-request-method": "POST",
    "access-control-request-headers": "authorization,content-type",
}


async def test_an_allowed_origin_may_send_its_key_and_read_responses(engine_of: EngineOf, http_of: HttpOf) -> None:
    async with serving(engine_of(), HttpConfig(api_key=("k",), allowed_origin=(PAGE,))) as served:
        http = http_of(served)
        first = await http.options("/v1/chat/completions", headers=ASKED_FIRST)
        key = {"origin": PAGE, "authorization": "Bearer k"}
        streamed = await http.post("/v1/chat/completions", json={**CHAT, "stream": True}, headers=key)
        refused = await http.post("/v1/chat/completions", json=CHAT, headers={"origin": PAGE})
    assert first.status_code == 200
    assert first.headers["access-control-allow-headers"] == "authorization,content-type"
    assert (streamed.status_code, refused.status_code) == (200, 401)
    assert streamed.text.endswith("data: [DONE]\n\n")
    for answer in (first, streamed, refused):
        assert answer.headers["access-control-allow-origin"] == PAGE
        assert "access-control-allow-credentials" not in answer.headers
        assert "origin" in answer.headers["vary"].lower(), "no cache hands it to another page"
    assert "x-request-id" in refused.headers["access-control-expose-headers"]


async def test_a_page_may_reach_a_server_in_a_private_network(engine_of: EngineOf, http_of: HttpOf) -> None:
    asked = {**ASKED_FIRST, "access-control-request-private-network": "true"}
    async with serving(engine_of(), HttpConfig(allowed_origin=(PAGE,))) as served:
        http = http_of(served)
        first = await http.options("/v1/chat/completions", headers=asked)
        other = await http.options("/v1/chat/completions", headers={**asked, "origin": "https://elsewhere.example.org"})
    assert (first.status_code, first.headers["access-control-allow-private-network"]) == (200, "true")
    assert other.status_code == 400


@pytest.mark.parametrize("allowed", [(), (PAGE,)])
@pytest.mark.parametrize(
    "origin", ["https://elsewhere.example.org", "null", f"{PAGE}.evil.org", "http://chat.example.org", f"{PAGE}:1", ""]
)
async def test_no_other_page_may_read_anything(
    engine_of: EngineOf, http_of: HttpOf, allowed: tuple[str, ...], origin: str
) -> None:
    async with serving(engine_of(), HttpConfig(allowed_origin=allowed)) as served:
        http = http_of(served)
        other = {**ASKED_FIRST, "origin": origin}
        first = await http.options("/v1/chat/completions", headers=other)
        answer = await http.post("/v1/chat/completions", json=CHAT, headers={"origin": other["origin"]})
    assert first.status_code == (400 if allowed else 405)
    assert answer.status_code == 200
    assert not [name for each in (first, answer) for name in each.headers if name == "access-control-allow-origin"]


@pytest.mark.parametrize(
    "origin",
    ["", "chat.example.org", "https://chat.example.org/", "https://Chat.example.org", "https://", "http://[::1"],
)
def test_what_no_browser_sends_is_refused_at_the_start(origin: str) -> None:
    with pytest.raises(ValueError, match=r"--allowed-origin must be \* or like https://"):
        HttpConfig(allowed_origin=(origin,))


@pytest.mark.parametrize(
    "origin", ["*", "http://localhost:3000", "https://chat.example.org", "http://[::1]:8080", "app://x"]
)
def test_origins_are_taken(origin: str) -> None:
    assert HttpConfig(allowed_origin=(origin,)).allowed_origin == (origin,)
