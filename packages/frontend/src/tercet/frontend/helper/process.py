"""Helper process as the frontend sees it: started on demand, and replaced after it died."""

import asyncio
import contextlib
import os
import signal
import sys
from asyncio.subprocess import PIPE, Process
from typing import Any

from tercet.frontend.helper.pipe import LENGTH, encode_frame

ANSWER_TIMEOUT = 20.0
"""Seconds to wait for an answer, however little processor time the helper gets."""
_BUFFER = 1 << 20
"""Bytes of an answer that are buffered before the helper waits."""
_OUT_OF_MEMORY = {-signal.SIGABRT, -signal.SIGSEGV, -signal.SIGBUS}
"""Exit codes of Rust and C when the heap or the stack is exhausted."""


class HelperDiedError(Exception):
    """Death of a helper without an answer.

    `why` completes "it takes too ...", if its input is at fault; None otherwise.
    """

    def __init__(self, module: str, status: int) -> None:
        super().__init__(f"{module}: helper died: status={status}")
        self.why: str | None = None
        if status == -signal.SIGPROF:
            self.why = "long"
        elif status in _OUT_OF_MEMORY:
            self.why = "much memory"


class HelperProcess:
    """Process that runs a module, which answers one message at a time until its input ends."""

    def __init__(self, module: str) -> None:
        self._module = module
        self._process: Process | None = None

    @property
    def pid(self) -> int | None:
        """Return the id of the running process, or None."""
        process = self._process
        return process.pid if process is not None and process.returncode is None else None

    async def ask(self, message: Any, seconds: float = ANSWER_TIMEOUT) -> bytes:
        """Return the encoded answer to a message. Raises HelperDiedError, TimeoutError, OSError.

        After any failure, and on cancellation, the process is ended: it would be blocked by what was left half-way.
        """
        try:
            if self.pid is None:
                self._process = await asyncio.create_subprocess_exec(
                    sys.executable, "-m", self._module, stdin=PIPE, stdout=PIPE, env=_environment(), limit=_BUFFER
                )
            assert self._process is not None
            return await self._exchange(self._process, encode_frame(message), seconds)
        except BaseException:
            await self.stop()
            raise

    async def _exchange(self, process: Process, frame: bytes, seconds: float) -> bytes:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            async with asyncio.timeout(seconds):
                if process.stdin.is_closing():  # uvloop closed it when the process died, and would raise RuntimeError
                    raise BrokenPipeError
                process.stdin.write(frame)
                await process.stdin.drain()
                size = int.from_bytes(await process.stdout.readexactly(LENGTH), "little")
                return await process.stdout.readexactly(size)
        except (asyncio.IncompleteReadError, ConnectionError):
            raise HelperDiedError(self._module, await process.wait()) from None

    async def stop(self) -> None:
        """End the process, if there is one."""
        process, self._process = self._process, None
        if process is not None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()


def _environment() -> dict[str, str]:
    """Return this process's environment without API keys, because a helper reads untrusted input."""
    return {name: value for name, value in os.environ.items() if not name.startswith("TERCET_")}
