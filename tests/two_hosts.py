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


class Host:
    """A `tercet serve` whose output is a pipe: host 0, or another host, which serves no HTTP."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self.process = process
        self.lines: list[str] = []
        self.url = ""
        self._ready = threading.Event()
        threading.Thread(target=self._read, daemon=True).start()

    @classmethod
    def start(cls, command: Sequence[str]) -> "Host":
        """Start a command of this machine."""
        return cls(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True))

    def wait(self) -> "Host":
        """Wait until it serves, or runs its ranks."""
        assert self._ready.wait(START_LIMIT), "\n".join(self.lines)
        return self

    def heard_at(self, words: str, after: int) -> float:
        """Wait until a line after the first `after` ones has these words; return the time."""
        end = time.monotonic() + START_LIMIT
        while not any(words in line for line in self.lines[after:]):
            assert time.monotonic() < end, "\n".join(self.lines)
            time.sleep(0.02)
        return time.monotonic()

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as output:
            for line in output:
                self.lines.append(line.rstrip())
                if found := re.match(r"ready( at (http://\S+)|: )", line):
                    self.url = found[2] or ""
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
