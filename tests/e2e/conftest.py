"""Servers for the end-to-end tests."""

import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from openai import OpenAI

from tests.server_process import Server


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    """One server on the embedded model for all tests that leave it as they found it."""
    running = Server(os.environ.get("TERCET_TEST_MODEL", "embedded"), "--kv-cache-bytes", "64MiB").wait()
    yield running
    assert running.stop() == 0, "\n".join(running.lines)


@pytest.fixture(scope="session")
def model(server: Server) -> str:
    """The name of the model it serves."""
    name: str = server.get("/v1/models")["data"][0]["id"]
    return name


@pytest.fixture
def client(server: Server) -> OpenAI:
    """A client of that server."""
    return server.client()


@pytest.fixture(scope="session")
def start() -> Iterator[Callable[..., Server]]:
    """Starts further servers, and stops what a test has left running."""
    started: list[Server] = []

    def begin(*arguments: str, **options: Any) -> Server:
        started.append(Server(*arguments, **options))
        return started[-1]

    yield begin
    for running in started:
        if running.process.poll() is None:
            running.process.kill()
        running.wait_for_end(10)
