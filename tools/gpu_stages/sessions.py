"""Commands in sessions of their own: nothing that one started outlives it."""

import os
import signal
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path


def run_apart(command: Sequence[str], limit: float) -> int | None:
    """A command's exit code, or None where it was not done after `limit` seconds.

    Then, or when it has ended or whoever waits is interrupted, what is left of its session is killed.
    """
    process = subprocess.Popen(command, start_new_session=True)
    try:
        return process.wait(limit)
    except subprocess.TimeoutExpired:
        return None
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        _kill_session(process.pid)


def _kill_session(session: int) -> None:
    """Those who are left, and have groups of their own, as the parts of a server do."""
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(ProcessLookupError, PermissionError):
            if os.getsid(pid := int(entry.name)) == session:
                os.kill(pid, signal.SIGKILL)
