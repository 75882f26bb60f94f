"""Rank 0's side of a follower: its process, the pipe that it lives by, and what it says."""

import contextlib
import logging
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import IO

import msgspec

from tercet.scheduler.executor.ranks.worker_main import Start

logger = logging.getLogger(__name__)

OnEnd = Callable[[int, int, str], None]
"""Told, from a thread, which rank ended, with which exit code (negative: a signal), and its last words."""

_COMMAND = (sys.executable, "-m", "tercet.scheduler.executor.ranks.worker_main")
_NEWS = re.compile(r"[0-9-]{10} [0-9:,]+ (DEBUG|INFO|WARNING) ")
"""How a line of its log begins that tells of nothing that it would die of."""
_LONGEST_WORDS = 500
_GRACE = 5.0
"""Seconds that it gets to end, which it does at once."""


class RankProcess:
    """A follower from start to exit, in this process's group. What it says is said here.

    Raises OSError where it cannot be started.
    """

    def __init__(self, start: Start, on_end: OnEnd) -> None:
        """`on_end` hears of an end that nobody asked for, or of one by an error."""
        self._rank = start.rank
        self._on_end = on_end
        self._released = False
        self._process = subprocess.Popen(
            _COMMAND, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._lifeline, self._output = self._process.stdin, self._process.stdout
        self._watcher = threading.Thread(target=self._watch, name=f"rank-{self._rank}", daemon=True)
        self._watcher.start()
        with contextlib.suppress(BrokenPipeError):  # the watcher tells of it
            self._lifeline.write(msgspec.json.encode(start) + b"\n")
            self._lifeline.flush()

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    def release(self) -> None:
        """Let it end. Does not wait for it."""
        self._released = True
        with contextlib.suppress(BrokenPipeError):
            self._lifeline.close()

    def join(self) -> None:
        """Wait for its end, not for long; once it was released."""
        try:
            self._process.wait(_GRACE)
        except subprocess.TimeoutExpired:
            logger.warning("rank %d does not end and is killed", self._rank)
            self._process.kill()
            self._process.wait()
        self._watcher.join(_GRACE)

    def _watch(self) -> None:
        words = _relay(self._output)
        code = self._process.wait()
        if code or not self._released:
            self._on_end(self._rank, code, words)


def describe_end(code: int, words: str) -> str:
    """How a process ended, in words: its own where it can have known."""
    how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"
    return f"{words} ({how})" if words and code != -signal.SIGKILL else how


def _relay(output: IO[bytes]) -> str:
    """Say what a follower says, until it ends. Returns its last line that may say what is wrong."""
    words = ""
    with output:
        for line in output:
            text = line.decode(errors="replace").rstrip()
            if text:
                sys.stderr.write(f"{text}\n")
                sys.stderr.flush()
                words = words if _NEWS.match(text) else text[:_LONGEST_WORDS]
    return words
