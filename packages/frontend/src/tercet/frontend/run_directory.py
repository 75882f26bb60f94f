"""Where the inboxes of one machine's parts lie."""

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO

_PREFIX = "tercet-"
_LOCK = "lock"
_LONGEST_PLACE = 40
"""Characters: a socket's path may have 107 bytes, directory and all."""


@contextlib.contextmanager
def run_directory() -> Iterator[Path]:
    """A private directory for inboxes, with a path short enough for them; removed at the end.

    It holds a lock as long as this process lives, so that what a killed process left behind is known, and goes too.
    """
    place = tempfile.gettempdir()
    place = place if len(place) <= _LONGEST_PLACE else "/tmp"  # noqa: S108
    _remove_abandoned(Path(place))
    path, lock = _locked(place)
    with lock:
        try:
            yield path
        finally:
            shutil.rmtree(path, ignore_errors=True)


def _locked(place: str) -> tuple[Path, IO[str]]:
    """A new directory and its lock. One that others took for abandoned, before it was locked, is left to them."""
    while True:
        path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=place))
        lock = (path / _LOCK).open("w")
        fcntl.flock(lock, fcntl.LOCK_EX)
        if (path / _LOCK).exists():
            return path, lock
        lock.close()


def _remove_abandoned(place: Path) -> None:
    for path in place.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):
            if path.lstat().st_uid != os.getuid():
                continue
            with (path / _LOCK).open() as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path, ignore_errors=True)
