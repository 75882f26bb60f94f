"""Detokenizer process between a scheduler and a frontend, over real sockets."""

import hashlib
import os
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from packages.detokenizer.tests.batches import batch
from tercet.detokenizer.vocabulary import Vocabulary
from tercet.protocol.messages.messages import (
    BatchStrOutput,
    FrontendInbox,
    Heartbeat,
    Message,
    SchedulerInbox,
    TokenizerFiles,
    TokenizerFilesReq,
)
from tercet.protocol.messages.values import FinishReason, FinishType, Phase, Role
from tercet.protocol.node import Delivery, NodeConfig, PeerDown, PeerReady, PeerUp, ThreadNode


class Peers:
    """Scheduler and frontend on real sockets, around a detokenizer process."""

    def __init__(self, directory: Path, tokenizer: bytes) -> None:
        address = f"ipc://{directory}"
        self.asked: list[str] = []
        self._came: deque[Delivery] = deque()
        sha256 = hashlib.sha256(tokenizer).hexdigest()

        def answer(source: str, message: Message) -> tuple[Message, *tuple[bytes, ...]]:
            self.asked.append(source)
            assert isinstance(message, TokenizerFilesReq)
            return TokenizerFiles(id=message.id, model="m", names=["tokenizer.json"], sha256=[sha256]), tokenizer

        def beat(_: str) -> Heartbeat:
            return Heartbeat(phase=Phase.IDLE)

        self.scheduler = ThreadNode(
            NodeConfig(Role.SCHEDULER, "s", address), SchedulerInbox, beat, answers={TokenizerFilesReq: answer}
        )
        specs = (f"{address}/s.*", f"{address}/d.*")
        self.frontend = ThreadNode(NodeConfig(Role.FRONTEND, "f", address, connect=specs), FrontendInbox, beat)
        self.scheduler.start()
        self.frontend.start()

    def wait_for(self, wanted: Callable[[Delivery], bool]) -> Delivery:
        """Return the next delivery to the frontend that matches."""
        end = time.monotonic() + 30
        while time.monotonic() < end:
            self._came += self.frontend.drain(0 if self._came else 0.2)
            while self._came:
                if wanted(delivery := self._came.popleft()):
                    return delivery
        raise AssertionError("it never came")

    def close(self) -> None:
        self.frontend.close("done")
        self.scheduler.close("done")


@pytest.fixture
def peers(tmp_path_factory: pytest.TempPathFactory, byte_level: Vocabulary) -> Iterator[tuple[Peers, Path]]:
    directory = tmp_path_factory.mktemp("d")
    directory.chmod(0o700)
    peers = Peers(directory, byte_level.tokenizer.to_str().encode())
    yield peers, directory
    peers.close()


def part(directory: Path, *options: str, pass_fds: tuple[int, ...] = ()) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "tercet.detokenizer", "--peer", "d", "--listen", f"ipc://{directory}", *options]
    return subprocess.Popen(command, pass_fds=pass_fds)


def test_a_process_serves_a_scheduler_and_a_frontend_and_leaves_when_told(
    peers: tuple[Peers, Path], byte_level: Vocabulary
) -> None:
    sides, directory = peers
    process = part(directory)
    try:
        sides.wait_for(lambda it: isinstance(it.message, PeerReady) and it.source == "d")
        assert sides.asked == ["d"]
        ids = byte_level.tokenizer.encode("Привет, 😀!").ids
        assert sides.scheduler.send("d", batch(ids[:2]))
        assert sides.scheduler.send("d", batch(ids[2:], 2, FinishReason(FinishType.LENGTH)))
        text = ""
        while True:
            message = sides.wait_for(lambda it: isinstance(it.message, BatchStrOutput)).message
            assert isinstance(message, BatchStrOutput)
            text += message.texts[0]
            if message.finishes:
                break
        assert text == "Привет, 😀!"
        process.send_signal(signal.SIGTERM)
        down = sides.wait_for(lambda it: isinstance(it.message, PeerDown) and it.source == "d").message
        assert isinstance(down, PeerDown)
        assert "stopping" in down.reason
        assert process.wait(10) == 0
    finally:
        process.kill()
        process.wait()


def test_a_process_leaves_with_its_parent(peers: tuple[Peers, Path]) -> None:
    sides, directory = peers
    read, write = os.pipe()
    process = part(directory, "--parent-fd", str(read), pass_fds=(read,))
    try:
        os.close(read)
        sides.wait_for(lambda it: isinstance(it.message, PeerUp) and it.source == "d")
        os.close(write)
        assert process.wait(10) == 0
    finally:
        process.kill()
        process.wait()
