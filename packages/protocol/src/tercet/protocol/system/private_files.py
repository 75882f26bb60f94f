"""Files and directories that are this user's alone, whatever the umask."""

import os
from pathlib import Path

PRIVATE_DIRECTORY = 0o700
PRIVATE_FILE = 0o600


def make_private_directory(path: Path) -> None:
    """Make a directory and those above it that are missing, each with mode 0700. One that exists stays as it is.

    Raises OSError.
    """
    missing = []
    for each in (path, *path.parents):
        if each.is_dir():
            break
        missing.append(each)
    for each in reversed(missing):
        try:
            each.mkdir(PRIVATE_DIRECTORY)
        except FileExistsError:
            if not each.is_dir():
                raise
        else:
            each.chmod(PRIVATE_DIRECTORY)  # a umask can also take bits of our own away


def open_private(path: Path, flags: int) -> int:
    """Open a file; one that is made gets mode 0600. Returns its descriptor. Raises OSError."""
    return os.open(path, flags | os.O_CREAT | os.O_CLOEXEC, PRIVATE_FILE)
