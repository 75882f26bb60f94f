"""A local server without keys gives nothing to a page that uses DNS rebinding."""

import socket
from collections.abc import Callable

import httpx2
import pytest

from tercet.frontend.config.config import HttpConfig
from tercet.frontend.server.app import build_app
from tercet.frontend.server.listener import is_local
from tercet.frontend.testing import FakeEngine, Served, serving

EngineOf = Callable[..., FakeEngine]
HttpOf = Callable[[Served], httpx2.AsyncClient]

OPEN = HttpConfig()
PAGE = "evil.example.org"


async def called(engine: FakeEngine, host: str, config: HttpConfig = OPEN, *, local: bool = True) -> int:
    """Return the status of a request with this Host header."""
    async with serving(engine, config) as served:
        app = build_app(served.manager, config, local=local)
        headers = {"host": host, "authorization": "Bearer k"}
        transport = httpx2.ASGITransport(app=app)
        async with httpx2.AsyncClient(transport=transport, base_url="http://127.0.0.1") as http:
            assert (await http.get("/live", headers=headers)).status_code == 200, "probes call it as they like"
            answer = await http.get("/v1/models", headers=headers)
    if answer.status_code == 403:
        assert answer.json()["error"]["code"] == "unknown_host"
    return int(answer.status_code)


@pytest.mark.parametrize(
    "host",
    [
        *("127.0.0.1:30000", "localhost", "LOCALHOST:8000", "localhost.", "[::1]:30000", "192.168.1.5", "workstation"),
        *("api.localhost:8000", "host.docker.internal:30000", ""),
    ],
)
async def test_its_own_names_are_fine(engine_of: EngineOf, host: str) -> None:
    assert await called(engine_of(), host) == 200


@pytest.mark.parametrize(
    "host", [PAGE, f"{PAGE}:30000", "127.0.0.1.example.org", "localhost.example.org", "1.2.3.example"]
)
async def test_a_name_that_somebody_may_own_is_not(engine_of: EngineOf, host: str) -> None:
    assert await called(engine_of(), host) == 403


@pytest.mark.parametrize(
    ("config", "local"),
    [
        (HttpConfig(api_key=("k",)), True),
        (OPEN, False),
        (HttpConfig(allowed_origin=(f"https://{PAGE}",)), True),
        (HttpConfig(allowed_origin=("*",)), True),
    ],
)
async def test_with_a_key_or_for_others_or_by_leave_any_name_will_do(
    engine_of: EngineOf, config: HttpConfig, local: bool
) -> None:
    assert await called(engine_of(), PAGE, config, local=local) == 200


@pytest.mark.parametrize(("host", "local"), [("127.0.0.1", True), ("0.0.0.0", False)])
def test_what_only_this_machine_reaches(host: str, local: bool) -> None:
    with socket.create_server((host, 0)) as listener:
        assert is_local(listener) == local
