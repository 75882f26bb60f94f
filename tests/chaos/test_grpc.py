"""`kill -9` under a load of token ids over gRPC: streams continue, with the tokens of an unbroken run over HTTP."""

import random
import socket
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import httpx2
import pytest

pytest.importorskip("grpc_health.v1", reason="gRPC is an optional extra")

import grpc.aio

from packages.frontend.tests.grpc.calls import client as grpc_client
from packages.frontend.tests.grpc.calls import generate
from tests.chaos.conftest import BFLOAT16, References, Table, served
from tests.chaos.fault_injection import FaultInjection, assert_nothing_is_lost
from tests.chaos.load import FULL, SHORT, Job, Load, Outcome, shuffled
from tests.chaos.parts import Parts, watched
from tests.server_process import Server
from tests.two_hosts import free_port

SLOW = pytest.mark.slow
LONG = [SLOW, pytest.mark.timeout(7200)]


@dataclass(frozen=True)
class TokenJob(Job):
    """Greedy request: those of the gRPC service have no seed."""

    @property
    def greedy(self) -> bool:
        return True


class GrpcLoad(Load):
    """Runner of jobs over gRPC. The prompts are tokenized over HTTP."""

    def __init__(self, url: str, *, port: int) -> None:
        super().__init__(url)
        self._port = port

    async def _one(self, client: httpx2.AsyncClient, job: Job) -> None:
        outcome = Outcome(job, time.monotonic())
        self.outcomes.append(outcome)
        ids = (await client.post("/tokenize", json={"prompt": job.prompt})).json()["tokens"]
        sampling = {"temperature": 0.0, "max_new_tokens": job.length, "n": job.n, "ignore_eos": True}
        try:
            async with grpc_client(self._port) as peer:
                async for answer in peer.call("Generate", generate(ids, stream=job.streamed, sampling=sampling)):
                    await self._take(outcome, answer)
        except grpc.aio.AioRpcError as error:
            outcome.error = f"{error.code().name}: {error.details()}"
        outcome.end()

    async def _take(self, outcome: Outcome, answer: Any) -> None:
        if answer.HasField("chunk"):
            outcome.ids[answer.chunk.index] = [*outcome.ids.get(answer.chunk.index, []), *answer.chunk.token_ids]
            await self._arrived(outcome, len(answer.chunk.token_ids))
            return
        whole = list(answer.complete.output_ids)
        assert outcome.ids.setdefault(answer.complete.index, whole) == whole, "the end repeats the chunks"


def free_ports() -> int:
    """Return a port that is free with the one after it."""
    while True:
        port = free_port()
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port + 1)):
                return port


@pytest.fixture(scope="module")
def grpc_port() -> int:
    return free_ports()


@pytest.fixture(scope="module")
def grpc_server(grpc_port: int) -> Iterator[Server]:
    """Yield a server of one scheduler, in the model's own number format."""
    yield from served("--grpc-mode", port=grpc_port, common=BFLOAT16)


@pytest.fixture(scope="module")
def references() -> References:
    """The texts of this server, in place of those in float32."""
    return References()


@pytest.fixture
async def parts(grpc_server: Server) -> AsyncIterator[Parts]:
    with watched(grpc_server) as parts:
        await parts.ready()
        yield parts


@pytest.mark.parametrize(
    ("role", "count"),
    [
        ("scheduler", SHORT),
        pytest.param("detokenizer", SHORT, marks=SLOW),
        pytest.param("scheduler", FULL, marks=LONG),
        pytest.param("detokenizer", FULL, marks=LONG),
    ],
)
async def test_streams_of_token_ids_continue(
    parts: Parts, references: References, table: Table, grpc_port: int, role: str, count: int
) -> None:
    jobs = [TokenJob(each.number, each.tokens) for each in shuffled(count, 0)]
    fault = FaultInjection(parts, role, make_load=partial(GrpcLoad, port=grpc_port))
    await assert_nothing_is_lost(parts, references, table, fault, jobs, random.Random(0))
