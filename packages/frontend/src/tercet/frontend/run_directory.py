"""Where the inboxes of one machine's parts lie."""

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

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
    path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=place))
    with (path / _LOCK).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            yield path
        finally:
            shutil.rmtree(path, ignore_errors=True)


def _remove_abandoned(place: Path) -> None:
    for path in place.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):
            if path.lstat().st_uid != os.getuid():
                continue
            with (path / _LOCK).open() as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path, ignore_errors=True)
