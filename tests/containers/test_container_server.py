"""A server of the built images, by the commands of deploy/compose.yaml: chats, health checks, killed parts."""

import json
import subprocess
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.containers.conftest import Images
from tests.containers.container_server import ContainerServer
from tests.deploy_files import PARTS
from tests.namespaces import Network, why_not

REASON = why_not()
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(7200),
    pytest.mark.skipif(bool(REASON), reason=f"network namespaces: {REASON}"),
]

ADDRESSES = {
    "frontend": "10.204.0.10",
    "scheduler": "10.204.0.20",
    "detokenizer": "10.204.0.30",
    "client": "10.204.0.40",
}
START_LIMIT = 300.0


def until(condition: Callable[[], bool], server: ContainerServer) -> None:
    end = time.monotonic() + START_LIMIT
    while not condition():
        assert time.monotonic() < end, server.logs()
        time.sleep(0.5)


def chat(network: Network) -> dict[str, Any]:
    """Return the answer to a chat of a client."""
    body = {"model": "embedded", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 8, "temperature": 0}
    request = urllib.request.Request(
        f"http://{ADDRESSES['frontend']}:8000/v1/chat/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    answer: dict[str, Any] = network.on("client", lambda: json.load(urllib.request.urlopen(request, timeout=120)))
    return answer


@pytest.fixture(scope="module")
def server(images: Images, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ContainerServer]:
    network = Network(ADDRESSES, {part: [part] for part in PARTS})
    server = ContainerServer(network, tmp_path_factory.mktemp("server"), images.buildah)
    try:
        for service in ("keys", *PARTS):
            server.create(service)
        for _ in range(2):  # as on every `docker compose up`: the second run keeps the files of the first
            subprocess.run(server.keys, check=True, timeout=60)
        for part in PARTS:
            server.start(part)
        for part in PARTS:
            until(lambda part=part: server.healthy(part), server)  # type: ignore[misc]
        yield server
        assert {part: server.stop(part) for part in PARTS} == dict.fromkeys(PARTS, 0)
    finally:
        network.close()


@pytest.mark.parametrize("part", PARTS)
def test_images_health_checks_pass(server: ContainerServer, part: str) -> None:
    done = server.network.call(part, *server.image_health_command(part))
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("part", PARTS)
def test_parts_run_without_root_and_capabilities(server: ContainerServer, part: str) -> None:
    process = server.main_process(part)
    assert set(process.uids()) == {10001}
    with open(f"/proc/{process.pid}/status") as status:
        lines = dict(line.rstrip().split(":\t", 1) for line in status)
    assert {int(lines[name], 16) for name in ("CapPrm", "CapEff")} == {0}


@pytest.mark.parametrize("part", PARTS)
def test_a_killed_part_starts_again_and_chats_go_on(server: ContainerServer, part: str) -> None:
    before = chat(server.network)
    assert before["usage"]["completion_tokens"] == 8
    server.main_process(part).kill()
    server.network.processes[part].wait(timeout=60)
    with ThreadPoolExecutor(1) as threads:
        # A chat that arrives while a scheduler or detokenizer is down waits for its successor.
        waiting = threads.submit(chat, server.network) if part != "frontend" else None
        server.start(part)
        until(lambda: server.healthy(part), server)
        answers = [chat(server.network), *([waiting.result()] if waiting else [])]
    assert {each["choices"][0]["message"]["content"] for each in answers} == {
        before["choices"][0]["message"]["content"]
    }
