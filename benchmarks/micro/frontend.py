"""Cost of a frontend process: streams over HTTP, with an engine behind it that costs nothing.

This process simulates the scheduler and the detokenizer and paces the tokens; the frontend and its 64 clients are two
other processes. Every token's text is the time at which it was sent, so that its client can compute the delay. Chunks
are counted per second of the frontend's own processor time, on which other processes have little influence; one chunk
carries all tokens of a choice since the last.
"""

import asyncio
import hashlib
import socket
import statistics
import sys
import tempfile
import time
from pathlib import Path

import msgspec
import orjson
import psutil

from tercet.protocol.aio import AsyncNode
from tercet.protocol.config import NodeConfig
from tercet.protocol.membership.events import Delivery
from tercet.protocol.messages.messages import (
    BatchStrOutput,
    DetokenizerInbox,
    FirstTextRow,
    Heartbeat,
    Ready,
    SchedulerInbox,
    TokenizedGenerateReqInput,
    TokenizerFiles,
    TokenizerFilesReq,
)
from tercet.protocol.messages.values import FinishReason, FinishType, ModelIdentity, ModelLimits, Phase, Role, pack_ints
from tercet.scheduler.model_files import resolve_model, tokenizer_files

Row = tuple[str, float, str, float | None]
"""(figure, measured, unit, target)"""

STREAMS = 64
TOKENS = 400
REPEATS = 2
"""Streams that each client reads, one after the other."""
CHUNKS_PER_SECOND = 15_000
"""Target, per core."""
TOKEN_ID = 7


class Engine:
    """Simulated scheduler and detokenizer that give every request a token per tick."""

    def __init__(self, directory: Path) -> None:
        self._files = tokenizer_files(resolve_model("embedded"))
        self._active: dict[str, TokenizedGenerateReqInput] = {}
        self._positions: dict[str, int] = {}
        listen = f"ipc://{directory}"
        self._scheduler = AsyncNode(
            NodeConfig(role=Role.SCHEDULER, peer="scheduler-0", listen=listen),
            SchedulerInbox,
            self._status,
            self._on_deliveries,
        )
        self._detokenizer = AsyncNode(
            NodeConfig(role=Role.DETOKENIZER, peer="detokenizer-0", listen=listen),
            DetokenizerInbox,
            self._status,
            lambda _: None,
        )

    async def start(self) -> None:
        """Connect to the frontend, ready."""
        await self._scheduler.start()
        await self._detokenizer.start()
        limits = ModelLimits(model="fake", context_length=4096, vocab_size=4096, max_total_tokens=1 << 20)
        sums = {name: hashlib.sha256(content).hexdigest() for name, content in self._files.items()}
        self._scheduler.set_ready(Ready(limits=limits, identity=ModelIdentity(weights="w", files=sums)))
        self._detokenizer.set_ready(Ready())

    async def close(self) -> None:
        """Close the links."""
        await self._scheduler.close()
        await self._detokenizer.close()

    async def pace(self, interval: float) -> None:
        """Send ticks without end, and catch up on late ones."""
        due = time.perf_counter()
        while True:
            due += interval
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            self._tick()

    def _tick(self) -> None:
        """Send a token for every request in one message, with the time as its text."""
        rids = list(self._active)
        if not rids:
            return
        positions = [self._positions[rid] for rid in rids]
        text = f"<{time.monotonic():.6f}>"
        last = {row: FinishReason(FinishType.LENGTH) for row, place in enumerate(positions) if place == TOKENS - 1}
        batch = BatchStrOutput(
            rids=rids,
            indices=pack_ints([0] * len(rids)),
            attempts=pack_ints([0] * len(rids)),
            positions=pack_ints(positions),
            offsets=pack_ints(range(len(rids) + 1)),
            token_ids=pack_ints([TOKEN_ID] * len(rids)),
            texts=[text] * len(rids),
            openings=[
                FirstTextRow(row=row, prompt_tokens=9, cached_tokens=0)
                for row, place in enumerate(positions)
                if place == 0
            ],
            finishes=last,
        )
        if not self._detokenizer.send("frontend-0", batch):
            return  # the frontend is behind: these tokens come with the next tick
        for row, rid in enumerate(rids):
            self._positions[rid] += 1
            if row in last:
                del self._active[rid], self._positions[rid]

    def _on_deliveries(self, deliveries: list[Delivery]) -> None:
        for source, message, *_ in deliveries:
            match message:
                case TokenizerFilesReq():
                    sums = [hashlib.sha256(content).hexdigest() for content in self._files.values()]
                    reply = TokenizerFiles(id=message.id, model="fake", names=list(self._files), sha256=sums)
                    self._scheduler.send(source, reply, *self._files.values())
                case TokenizedGenerateReqInput():
                    self._active[message.rid] = message
                    self._positions[message.rid] = 0

    def _status(self, peer: str) -> Heartbeat:  # noqa: ARG002
        return Heartbeat(phase=Phase.STEP)


class Counts(msgspec.Struct):
    """Results of the clients in one round."""

    chunks: int
    tokens: int
    delays: list[float]


class Clients:
    """Process that reads the streams; see `frontend_clients/read_streams.py`."""

    _script = Path(__file__).parent / "frontend_clients" / "read_streams.py"
    _body = orjson.dumps(
        {"model": "fake", "messages": [{"role": "user", "content": "hello"}], "max_tokens": TOKENS, "stream": True}
    )

    async def start(self, port: int, spread: float) -> None:
        """Start the process; its clients start evenly over `spread` seconds."""
        words = [str(self._script), str(port), str(STREAMS), str(REPEATS), str(spread)]
        pipe = asyncio.subprocess.PIPE
        self._process = await asyncio.create_subprocess_exec(
            sys.executable, *words, stdin=pipe, stdout=pipe, limit=1 << 26
        )

    async def read(self) -> Counts:
        """Read all streams from their requests to their ends."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(self._body + b"\n")
        return msgspec.json.decode(await self._process.stdout.readline(), type=Counts)

    async def stop(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        await self._process.wait()


class Frontend:
    """Frontend process to be measured."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
        self.port: int = self._listener.getsockname()[1]

    async def start(self) -> None:
        """Start the process and wait until it accepts requests."""
        peers, fd = f"ipc://{self._directory}", self._listener.fileno()
        words = ["--peer", "frontend-0", "--listen", peers, "--fd", str(fd), "--log-level", "warning"]
        words += ["--scheduler", f"{peers}/scheduler-0.*", "--detokenizer", f"{peers}/detokenizer-0.*"]
        self._process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "tercet.frontend", *words, pass_fds=[fd]
        )
        self._seen = psutil.Process(self._process.pid)
        while not await self._healthy():
            assert self._process.returncode is None, "the frontend did not start"
            await asyncio.sleep(0.05)

    async def stop(self) -> None:
        """End the process."""
        self._process.terminate()
        await self._process.wait()
        self._listener.close()

    def seconds(self) -> float:
        """Return the processor time used so far."""
        used = self._seen.cpu_times()
        return float(used.user + used.system)

    async def _healthy(self) -> bool:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        writer.write(b"GET /health HTTP/1.1\r\nHost: bench\r\nConnection: close\r\n\r\n")
        answer = await reader.read()
        writer.close()
        return b" 200 " in answer


async def measure(interval: float, spread: float, rounds: int = 3) -> tuple[float, float, float]:
    """Return medians of chunks per second of processor time, tokens per second, and the p99 of delays in ms.

    A tick comes every `interval` seconds, and the clients start over `spread` seconds.
    """
    results = []
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        engine, frontend, clients = Engine(directory), Frontend(directory), Clients()
        await engine.start()
        await frontend.start()
        await clients.start(frontend.port, spread)
        pacing = asyncio.create_task(engine.pace(interval))
        for _ in range(rounds + 1):
            used, began = frontend.seconds(), time.perf_counter()
            counts = await clients.read()
            assert counts.tokens == STREAMS * REPEATS * TOKENS, f"{counts.tokens} tokens arrived"
            took, spent = time.perf_counter() - began, frontend.seconds() - used
            delays = sorted(counts.delays)
            results.append((counts.chunks / spent, counts.tokens / took, 1000 * delays[int(len(delays) * 0.99)]))
        pacing.cancel()
        await clients.stop()
        await frontend.stop()
        await engine.close()
    measured = results[1:]  # the first warms up
    return (
        statistics.median(each[0] for each in measured),
        statistics.median(each[1] for each in measured),
        statistics.median(each[2] for each in measured),
    )


def rows() -> list[Row]:
    """Return all figures with their targets."""
    half = 2 * STREAMS / CHUNKS_PER_SECOND
    per_core, _, delay = asyncio.run(measure(half, spread=TOKENS * half))
    _, flood, _ = asyncio.run(measure(STREAMS / 200_000, spread=0.0))
    return [
        (f"{STREAMS} streams at 7,500 tokens/s: chunks per second of a core", per_core, "chunks/s", CHUNKS_PER_SECOND),
        (f"{STREAMS} streams at 7,500 tokens/s: p99 of the way through", delay, "ms", 5.0),
        (f"{STREAMS} streams, as fast as it goes: tokens", flood, "tokens/s", None),
    ]


if __name__ == "__main__":
    for what, measured, unit, target in rows():
        print(f"{what:<70} {measured:>12,.1f} {unit:<9} target {target}")
