"""Commands in sessions of their own, whose processes do not outlive them."""

import os
import signal
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path


def run_apart(command: Sequence[str], limit: float) -> int | None:
    """Return a command's exit code, or None if it did not end within `limit` seconds.

    At the end, at the limit, or when the wait is interrupted, all processes of its session are killed.
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
    """Kill the remaining processes, including those with groups of their own such as the parts of a server."""
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(ProcessLookupError, PermissionError):
            if os.getsid(pid := int(entry.name)) == session:
                os.kill(pid, signal.SIGKILL)
