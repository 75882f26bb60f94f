"""Files and directories that only this user can access, under any umask."""

import logging
import os
from pathlib import Path

PRIVATE_DIRECTORY = 0o700
PRIVATE_FILE = 0o600

logger = logging.getLogger(__name__)


def make_private_directory(path: Path) -> None:
    """Make a directory and its missing parents, each with mode 0700. An existing one stays as it is.

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
            each.chmod(PRIVATE_DIRECTORY)  # a umask can also remove bits of the owner


def open_private(path: Path, flags: int) -> int:
    """Open a file and return its descriptor; a new file gets mode 0600. Raises OSError."""
    return os.open(path, flags | os.O_CREAT | os.O_CLOEXEC, PRIVATE_FILE)


def remove_oldest(directory: Path, pattern: str, most: int) -> None:
    """Keep the `most` newest files of a directory that match a pattern. Log an error if others cannot be removed."""
    try:
        for old in sorted(directory.glob(pattern), key=lambda each: each.stat().st_mtime)[:-most]:
            old.unlink(missing_ok=True)
    except OSError as error:
        logger.error("old files remain: directory=%s error=%s", directory, error)


def state_directory() -> Path:
    """Return the directory for persistent state of this user's programs. Raises OSError for a user without a home."""
    place = Path(os.environ.get("XDG_STATE_HOME", ""))
    if not place.is_absolute():  # the XDG specification says to ignore a relative path
        try:
            place = Path.home() / ".local" / "state"
        except RuntimeError:
            raise OSError("this user has no home directory, and neither HOME nor XDG_STATE_HOME is set") from None
    return place / "tercet"
