"""A model on two hosts, each a `tercet serve`: two processes of this machine, or of two network namespaces."""

import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import psutil

from tests.server_process import START_LIMIT


def free_port() -> int:
    """Return a port of the loopback address that is free now."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port: int = probe.getsockname()[1]
        return port


class OtherHost:
    """`tercet serve --node-rank N`, which serves no HTTP."""

    def __init__(self, command: Sequence[str]) -> None:
        self.lines: list[str] = []
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        self._ready = threading.Event()
        threading.Thread(target=self._read, daemon=True).start()

    def wait(self) -> "OtherHost":
        """Wait until it runs its ranks."""
        assert self._ready.wait(START_LIMIT), "\n".join(self.lines)
        return self

    def says(self, words: str, limit: float = 60.0) -> None:
        """Wait until a line of its output matches."""
        end = time.monotonic() + limit
        while not any(re.search(words, line) for line in self.lines):
            assert time.monotonic() < end, "\n".join(self.lines)
            time.sleep(0.05)

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as output:
            for line in output:
                self.lines.append(line.rstrip())
                if line.startswith("ready: "):
                    self._ready.set()


def command_of(model: Path | str, *options: str) -> list[str]:
    """Return the command line of a host other than 0."""
    return [str(Path(sys.executable).with_name("tercet")), "serve", str(model), *options]


def ranks_of(process: subprocess.Popen[str]) -> list[psutil.Process]:
    """Return the ranks that the scheduler's process of a `tercet serve` has started."""
    parts = psutil.Process(process.pid).children()
    return [rank for part in parts if "tercet.scheduler" in part.cmdline() for rank in part.children()]


def scheduler_of(process: subprocess.Popen[str]) -> psutil.Process:
    """Return the scheduler's process of a `tercet serve`."""
    (found,) = [part for part in psutil.Process(process.pid).children() if "tercet.scheduler" in part.cmdline()]
    return found
