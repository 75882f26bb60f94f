"""Whole server, started as a user would start it."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil
from openai import OpenAI

START_LIMIT = 120.0
STOP_LIMIT = 30.0


class Server:
    """Child process of `tercet serve` or a similar program, with its output."""

    def __init__(
        self,
        *arguments: str,
        env: dict[str, str] | None = None,
        program: Sequence[str] = (),
        key: str = "any",
        port: int = 0,
    ) -> None:
        self.key = key
        command = [sys.executable, *program]
        if not program:
            command = [str(Path(sys.executable).with_name("tercet")), "serve"]
        state = tempfile.mkdtemp(prefix="tercet-state-")
        weakref.finalize(self, shutil.rmtree, state, ignore_errors=True)
        self.process = subprocess.Popen(
            [*command, *arguments, "--port", str(port)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "XDG_STATE_HOME": state, **(env or {})},
        )
        self.lines: list[str] = []
        self.url = ""
        self._ready = threading.Event()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def wait(self) -> "Server":
        """Wait until the server is ready; if it ends instead, the error has its output."""
        if not self._ready.wait(START_LIMIT) or not self.url:
            self.process.kill()
            raise AssertionError("the server did not start:\n" + "\n".join(self.lines))
        return self

    def client(self, **options: Any) -> OpenAI:
        """Return the official client, in strict validation."""
        return OpenAI(
            base_url=f"{self.url}/v1",
            api_key=self.key,
            max_retries=0,
            timeout=60,
            _strict_response_validation=True,
            **options,
        )

    def get(self, path: str) -> Any:
        """Return the JSON at a path."""
        request = urllib.request.Request(f"{self.url}{path}", headers={"authorization": f"Bearer {self.key}"})
        with urllib.request.urlopen(request, timeout=10) as response:
            return json.load(response)

    def model(self) -> str:
        """Return the name of the first model."""
        name: str = self.get("/v1/models")["data"][0]["id"]
        return name

    def load(self) -> dict[str, int]:
        """Return the load in the first scheduler's last heartbeat."""
        load: dict[str, int] = self.get("/server_info")["schedulers"][0]["load"]
        return load

    def wait_for(self, condition: Callable[[dict[str, int]], bool], limit: float = 10.0) -> dict[str, int]:
        """Return the scheduler's load once it satisfies a condition."""
        end = time.monotonic() + limit
        while not condition(load := self.load()):
            assert time.monotonic() < end, f"still {load}"
            time.sleep(0.05)
        return load

    def part(self, peer: str) -> psutil.Process:
        """Return the process of a part."""
        children = psutil.Process(self.process.pid).children()
        [found] = [each for each in children if peer in each.cmdline()]
        return found

    def stop(self) -> int:
        """Send SIGTERM, because shells start background processes with SIGINT ignored; return the exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.wait_for_end(STOP_LIMIT)

    def wait_for_end(self, limit: float) -> int:
        """Return the exit code, once the process has ended and all its output was read."""
        code = self.process.wait(limit)
        self._reader.join(limit)
        return code

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as output:
            for line in output:
                self.lines.append(line.rstrip())
                if found := re.match(r"ready at (http://\S+)", line):
                    self.url = found[1]
                    self._ready.set()
        self._ready.set()
