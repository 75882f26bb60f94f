"""Parts of a server under test as processes, found by their peer ids."""

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Iterator

import psutil

from tercet.protocol.messages.messages import Heartbeat, SupervisorInbox
from tercet.protocol.messages.values import Load, Phase, Role
from tercet.protocol.node import NodeConfig, PeerDown, PeerReady, PeerUp, ThreadNode
from tests.server_process import Server

BACK = 60.0
"""Seconds for a part to be ready again on a busy machine."""


class Parts:
    """Child processes of one supervisor. A separate node listens to their heartbeats, as the supervisor does."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.listen = option_of(self._processes()[0], "--listen")
        """Address of the directory of all inboxes."""
        self.names = sorted(self.pids())
        specs = tuple(f"{self.listen}/{role}-*" for role in ("scheduler", "detokenizer", "frontend"))
        config = NodeConfig(Role.SUPERVISOR, "observer", self.listen, connect=specs)
        self._node = ThreadNode(config, SupervisorInbox, lambda _: Heartbeat(phase=Phase.IDLE))
        self._heartbeats: dict[str, Heartbeat] = {}
        self._ready: set[str] = set()
        self._node.start()

    def close(self) -> None:
        self._node.close("observed enough")

    def pids(self) -> dict[str, int]:
        """Return process ids by peer id."""
        return {name: process.pid for process in self._processes() if (name := option_of(process, "--peer"))}

    def of(self, role: str) -> list[str]:
        """Return the parts of a role."""
        return [name for name in self.names if name.startswith(role)]

    def busiest(self, role: str) -> str:
        """Return the part of a role with the most running requests, by its last heartbeat."""
        self._look()
        return max(self.of(role), key=lambda name: self._heartbeats[name].load.running)

    def signal(self, name: str, number: signal.Signals) -> int:
        """Send a signal to a part and return its process id."""
        pid = self.pids()[name]
        os.kill(pid, number)
        return pid

    async def replaced(self, name: str, pid: int) -> float:
        """Wait until a process other than `pid` is ready in this part's place; return the seconds."""
        began = time.monotonic()
        while self.pids().get(name, pid) == pid:
            assert time.monotonic() < began + BACK, f"{name} was not restarted: {self.server.lines[-20:]}"
            await asyncio.sleep(0.02)
        self._look()
        self._ready.discard(name)
        await self.ready()
        return time.monotonic() - began

    async def ready(self) -> None:
        """Wait until every part and the server are ready."""
        end = time.monotonic() + BACK
        while True:
            self._look()
            if self._ready.issuperset(self.names) and await asyncio.to_thread(self._served):
                return
            assert time.monotonic() < end, f"ready are only {self._ready}: {self.server.lines[-20:]}"
            await asyncio.sleep(0.02)

    async def idle(self) -> dict[str, Load]:
        """Wait until no part holds a request, and return each part's load."""
        end = time.monotonic() + 20.0
        while True:
            await asyncio.sleep(0.5)  # two heartbeats
            self._look()
            loads = {name: self._heartbeats[name].load for name in self.names}
            if not any(load.running or load.queued for load in loads.values()):
                return loads
            assert time.monotonic() < end, f"still held: {loads}"

    async def resumed(self) -> int:
        """Return the number of requests that lost their part and finished elsewhere, over all frontends."""
        counts: dict[str, int] = {}
        end = time.monotonic() + 20.0
        while len(counts) < len(self.of("frontend")):
            assert time.monotonic() < end, f"only {list(counts)} answer"
            info = await asyncio.to_thread(self.server.get, "/server_info")
            counts[info["frontend"]] = info["requests_resumed_and_finished"]
        return sum(counts.values())

    def memory(self) -> dict[str, int]:
        """Return the private bytes of each part. Libraries do not count: a part's share grows when others end."""
        infos = {option_of(process, "--peer"): process.memory_info() for process in self._processes()}
        return {name: info.rss - info.shared for name, info in infos.items()}

    def _look(self) -> None:
        for source, message, *_ in self._node.drain():
            match message:
                case PeerReady(peer):
                    self._ready.add(peer)
                case PeerUp(peer) | PeerDown(peer):
                    self._ready.discard(peer)
                case Heartbeat():
                    self._heartbeats[source] = message

    def _served(self) -> bool:
        """Return whether every frontend knows all schedulers and detokenizers."""
        asked: set[str] = set()
        for _ in range(8 * len(self.of("frontend"))):
            try:
                info = self.server.get("/server_info")
            except OSError:
                return False
            asked.add(info["frontend"])
            for role in ("scheduler", "detokenizer"):
                if sum(each["ready"] for each in info[f"{role}s"]) != len(self.of(role)):
                    return False
            if len(asked) == len(self.of("frontend")):
                return True
        return False

    def _processes(self) -> list[psutil.Process]:
        return [
            process for process in psutil.Process(self.server.process.pid).children() if option_of(process, "--peer")
        ]


def assert_nothing_is_left(loads: dict[str, Load]) -> None:
    """Assert that every page and slot of every scheduler is free, or only cached."""
    for name, load in loads.items():
        assert load.running == load.queued == 0, name
        assert load.pages_free + load.pages_cached == load.pages_total, (name, load)
        assert load.slots_free == load.slots_total, (name, load)


@contextlib.contextmanager
def watched(server: Server) -> Iterator[Parts]:
    """Yield the parts of a running server."""
    parts = Parts(server)
    try:
        yield parts
    finally:
        parts.close()


def option_of(process: psutil.Process, name: str) -> str:
    """Return the value of an option in a process's command line; empty if the process has ended."""
    with contextlib.suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
        command = process.cmdline()
        if name in command:
            return str(command[command.index(name) + 1])
    return ""
