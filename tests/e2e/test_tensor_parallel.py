"""A model shared by two processes, served like any other; the death of either is the death of the scheduler."""

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from openai import OpenAI

from tests.e2e.long_answer import long_answer
from tests.e2e.random_checkpoint import PLAIN, write
from tests.server_process import Server

TOKENS = 200
OPTIONS = ("--kv-cache-bytes", "16MiB", "--dtype", "float32")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("qwen") / "tiny-qwen", PLAIN)


@pytest.fixture(scope="module")
def shared(start: Callable[..., Server], checkpoint: Path) -> Iterator[Server]:
    server = start(str(checkpoint), *OPTIONS, "--tensor-parallel-size", "2").wait()
    yield server
    processes = ranks(server)
    assert server.stop() == 0, "\n".join(server.lines)
    assert not any(map(lives, processes))


@pytest.fixture
def client(shared: Server) -> OpenAI:
    return shared.client()


def ranks(server: Server) -> list[psutil.Process]:
    """Return the processes of the model: rank 0 and its children."""
    parts = psutil.Process(server.process.pid).children()
    (scheduler,) = [part for part in parts if "tercet.scheduler" in part.cmdline()]
    return [scheduler, *scheduler.children()]


def lives(process: psutil.Process) -> bool:
    """Return whether a process runs; zombies do not."""
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


@pytest.mark.parametrize(
    ("rank", "words"),
    [
        (1, r"rank 1 of this model ended.*: killed by SIGKILL"),
        pytest.param(0, r"died: killed by SIGKILL", marks=pytest.mark.slow),
    ],
    ids=["rank 1", "rank 0"],
)
def test_a_request_outlives_either_process(shared: Server, client: OpenAI, rank: int, words: str) -> None:
    model = shared.model()
    whole = long_answer(client, model, TOKENS)
    assert len(set(whole.split())) > 20
    before = ranks(shared)
    assert len(before) == 2
    assert long_answer(client, model, TOKENS, 20, before[rank].kill) == whole
    assert not any(map(lives, before))
    assert any(re.search(words, line) for line in shared.lines), "\n".join(shared.lines)
