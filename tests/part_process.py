"""Parts as separate processes: start, output, stop, and a completion request."""

import json
import os
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

LIMIT = 120.0


class ChildProcess:
    """Process of one part, with its output in a file."""

    def __init__(
        self, command: Sequence[str], log: Path, *, env: dict[str, str] | None = None, fds: Sequence[int] = ()
    ) -> None:
        self._log = log
        with log.open("w") as output:
            self.process = subprocess.Popen(
                command,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, "OMP_NUM_THREADS": "1", **(env or {})},
                pass_fds=tuple(fds),
            )

    @property
    def output(self) -> str:
        """Return the output so far."""
        return self._log.read_text()

    def wait_for(self, words: str) -> None:
        """Wait until the output has these words."""
        until(lambda: words in self.output, lambda: f"never said {words!r}:\n{self.output}")

    def stop(self) -> int:
        """Send SIGTERM and return the exit status."""
        self.process.terminate()
        return self.process.wait(LIMIT)

    def kill(self) -> None:
        """Kill the process if it has not ended."""
        self.process.kill()
        self.process.wait()


def until(condition: Callable[[], bool], complaint: Callable[[], str], limit: float = LIMIT) -> None:
    """Wait for a condition; `complaint` describes the state if it does not come true."""
    end = time.monotonic() + limit
    while not condition():
        assert time.monotonic() < end, complaint()
        time.sleep(0.02)


def listener() -> tuple[socket.socket, str]:
    """Return a listening socket for a frontend to inherit, and its URL."""
    sock = socket.create_server(("127.0.0.1", 0))
    return sock, f"http://127.0.0.1:{sock.getsockname()[1]}"


def healthy(url: str) -> bool:
    """Return whether a frontend accepts requests."""
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=5):
            return True
    except OSError:
        return False


def complete(url: str, prompt: str = "Once upon a time", **fields: Any) -> Any:
    """Return the response to a completion. Raises AssertionError with the server's text for an error."""
    body = json.dumps({"model": "embedded", "prompt": prompt, "max_tokens": 8, "temperature": 0} | fields).encode()
    request = urllib.request.Request(f"{url}/v1/completions", body, {"content-type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=60) as response:
            return json.load(response)
    except urllib.error.HTTPError as error:
        raise AssertionError(error.read().decode()) from error
