"""A parent's handle of a rank: its process, the pipe whose end it waits for, its heartbeats and its log output."""

import contextlib
import logging
import os
import re
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO

import msgspec

from tercet.scheduler.executor.ranks.liveness import INTERVAL, SilenceTimer
from tercet.scheduler.executor.ranks.worker_main import SERVING, Start

logger = logging.getLogger(__name__)

OnEnd = Callable[[int, int, str], None]
"""Callback, in a thread: rank, exit code (negative: a signal), and the reason in one line."""

_COMMAND = (sys.executable, "-m", "tercet.scheduler.executor.ranks.worker_main")
_HARMLESS_LINE = re.compile(r"[0-9-]{10} [0-9:,]+ (DEBUG|INFO|WARNING) ")
"""Start of a log line that cannot be the reason of an exit."""
_LONGEST_WORDS = 500
_STARVED = 10.0
"""Seconds without a heartbeat after which a process that is not stopped hangs: on a busy machine it may lack a core."""
_GRACE = 5.0
"""Seconds until a process that should end is killed."""


class RankProcess:
    """The process of another rank, from start to exit, in this process's group. Its output is copied to stderr.

    A rank that sends no heartbeats is killed. Raise OSError if the process cannot be started.
    """

    def __init__(self, start: Start, on_end: OnEnd) -> None:
        """Start the process; `on_end` is called if it ends unasked or with an error."""
        self._rank = start.rank
        self._on_end = on_end
        self._released = False
        self._hangs = False
        self._heartbeats, theirs = os.pipe()
        try:
            self._process = subprocess.Popen(
                [*_COMMAND, str(theirs)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                pass_fds=[theirs],
            )
        except OSError:
            os.close(self._heartbeats)
            raise
        finally:
            os.close(theirs)
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._lifeline, self._output = self._process.stdin, self._process.stdout
        self._watcher = threading.Thread(target=self._watch, name=f"rank-{self._rank}", daemon=True)
        self._watcher.start()
        threading.Thread(target=self._listen, name=f"rank-{self._rank}-heartbeats", daemon=True).start()
        with contextlib.suppress(BrokenPipeError):  # the watcher reports the end
            self._lifeline.write(msgspec.json.encode(start) + b"\n")
            self._lifeline.flush()

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    def release(self) -> None:
        """Close the pipe, so that the process ends, without waiting for it."""
        self._released = True
        with contextlib.suppress(BrokenPipeError):
            self._lifeline.close()

    def kill(self) -> None:
        """Kill the process, without waiting for its end."""
        self._released = True
        self._process.kill()

    def join(self) -> None:
        """Wait for the end of a released process; kill it after a few seconds."""
        try:
            self._process.wait(_GRACE)
        except subprocess.TimeoutExpired:
            logger.warning("rank %d does not exit, killing it", self._rank)
            self._process.kill()
            self._process.wait()
        self._watcher.join(_GRACE)

    def _watch(self) -> None:
        words = _relay(self._output)
        code = self._process.wait()
        if not self._released or code > 0:
            reason = "it hangs, and is killed" if self._hangs else describe_end(code, words)
            self._on_end(self._rank, code, reason)

    def _listen(self) -> None:
        """Read heartbeats until the process ends. Kill it if there are none."""
        timer = SilenceTimer(time.monotonic())
        with open(self._heartbeats, "rb", buffering=0) as pipe:
            while True:
                if select.select([pipe], [], [], INTERVAL)[0]:
                    if not (beats := pipe.read(64)):
                        return
                    timer.heard(time.monotonic(), loading=not beats.endswith(SERVING))
                if timer.expired(time.monotonic()) and not self._hangs and self._is_hung(timer.silence):
                    self._hangs = True
                    self._process.kill()

    def _is_hung(self, silence: float) -> bool:
        """Return whether a silent process hangs: at once if it is stopped, later if it may only lack a core."""
        return silence > _STARVED or _is_stopped(self.pid)


def _is_stopped(pid: int) -> bool:
    """Return whether a signal or a debugger has stopped a process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0] in "Tt"
    except (OSError, IndexError):  # it has ended, or the system has no such files
        return False


def describe_end(code: int, words: str) -> str:
    """Describe the end of a process, with its last output unless SIGKILL ended it."""
    how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"
    return f"{words} ({how})" if words and code != -signal.SIGKILL else how


def _relay(output: IO[bytes]) -> str:
    """Copy the output of a process to stderr until it ends. Return its last line that may be an error."""
    words = ""
    with output:
        for line in output:
            text = line.decode(errors="replace").rstrip()
            if text:
                sys.stderr.write(f"{text}\n")
                sys.stderr.flush()
                words = words if _HARMLESS_LINE.match(text) else text[:_LONGEST_WORDS]
    return words
