"""Commands in sessions of their own: nothing that one started outlives it."""

import os
import signal
import subprocess
from collections.abc import Sequence
from contextlib import suppress


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
