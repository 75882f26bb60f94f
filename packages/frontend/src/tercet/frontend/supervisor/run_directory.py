"""Directory of the inboxes of one machine's parts."""

import contextlib
import fcntl
import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path

from tercet.protocol.errors import ChannelError
from tercet.protocol.system.socket_directory import new_socket_directory

_PREFIX = "tercet-"
_NAME = re.compile(r"tercet-[a-z0-9_]{8}")
"""Names that `tempfile.mkdtemp` makes from the prefix."""
_LOCK = "lock"
_MARK = b"Sockets of a `tercet serve`, which holds a lock of this file. Removed by a later one.\n"
"""Content of the lock file once its lock is held. It proves that a `tercet serve` made the directory."""
_SOCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*\.ipc")
_FILE = os.O_NOFOLLOW | os.O_CLOEXEC
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | _FILE


@contextlib.contextmanager
def run_directory() -> Iterator[Path]:
    """Yield a private directory for inboxes, with a path short enough for sockets, and remove it at the end.

    Directories that killed processes left behind are removed first, if they hold the mark, no lock, and nothing but
    sockets. Raises OSError if no directory can be made.
    """
    try:
        path = new_socket_directory(_PREFIX)
    except ChannelError as error:
        raise OSError(str(error)) from error
    _remove_abandoned(path.parent)
    lock = _take_lock(path)
    try:
        yield path
    finally:
        with contextlib.suppress(OSError):
            _remove(path)
        os.close(lock)


def _take_lock(path: Path) -> int:
    """Create the lock file and lock it. The mark is written last: without it no other process removes the directory."""
    lock = os.open(path / _LOCK, os.O_RDWR | os.O_CREAT | os.O_EXCL | _FILE, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX)
    with contextlib.suppress(
        OSError
    ):  # on a full disk sockets still work, and without the mark no process removes them
        os.write(lock, _MARK)
    return lock


def _remove_abandoned(place: Path) -> None:
    for path in place.glob(f"{_PREFIX}*"):
        if _NAME.fullmatch(path.name):
            with contextlib.suppress(OSError):
                _remove_if_abandoned(path)


def _remove_if_abandoned(path: Path) -> None:
    """Remove a directory whose lock no process holds. Raises OSError if `tercet serve` did not make it."""
    folder = os.open(path, _DIRECTORY)
    try:
        status = os.fstat(folder)
        if status.st_uid != os.geteuid() or status.st_mode & 0o777 != 0o700:
            return
        lock = os.open(_LOCK, os.O_RDWR | os.O_NONBLOCK | _FILE, dir_fd=folder)
        try:
            if not stat.S_ISREG(os.fstat(lock).st_mode):
                return
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.read(lock, len(_MARK) + 1) == _MARK:
                _remove(path)
        finally:
            os.close(lock)
    finally:
        os.close(folder)


def _remove(path: Path) -> None:
    """Remove a directory that holds only a lock file and sockets; leave any other unchanged.

    Symbolic links are not followed: every name is looked up in the opened directory.
    """
    folder = os.open(path, _DIRECTORY)
    try:
        names = os.listdir(folder)
        if not all(name == _LOCK or _is_socket(name, folder) for name in names):
            return
        for name in sorted(names, key=lambda name: name == _LOCK):
            os.unlink(name, dir_fd=folder)
    finally:
        os.close(folder)
    path.rmdir()


def _is_socket(name: str, folder: int) -> bool:
    mode = os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode
    return _SOCKET.fullmatch(name) is not None and stat.S_ISSOCK(mode)
