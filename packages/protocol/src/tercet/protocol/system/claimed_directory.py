"""Directory of files that belong to a running server: one process claims it, and any may remove it afterwards."""

import contextlib
import fcntl
import os
import shutil
from pathlib import Path

from tercet.protocol.system.private_files import make_private_directory, open_private

_LOCK = "lock"
_MARK = b"Files of a running Tercet server, which holds a lock of this file. Removed when it stops.\n"
"""Content of the lock file. It proves that `claim` made the directory."""


def claim(directory: Path) -> int:
    """Make a directory, mark it, and lock it until the returned descriptor is closed or the process ends.

    Raises BlockingIOError if another descriptor holds the lock, or OSError.
    """
    make_private_directory(directory)
    lock = open_private(directory / _LOCK, os.O_RDWR)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.pwrite(lock, _MARK, 0)
    except OSError:
        os.close(lock)
        raise
    return lock


def remove_unclaimed(directory: Path) -> None:
    """Remove a directory that `claim` made, unless it is locked. Leave any other unchanged. Ignore OSError."""
    with contextlib.suppress(OSError):
        lock = os.open(directory / _LOCK, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.read(lock, len(_MARK) + 1) == _MARK:
                shutil.rmtree(directory, ignore_errors=True)
        finally:
            os.close(lock)
