"""New private directories for ipc:// sockets, with sufficiently short paths."""

import os
import tempfile
from pathlib import Path

from tercet.protocol.errors import ChannelError

_LONGEST_PLACE = 40
"""Bytes of the parent's path: a socket's path may have 107 bytes in all."""
_GLOB = frozenset("*?[")
"""Characters with a special meaning in peer addresses."""


def new_socket_directory(prefix: str) -> Path:
    """Make a directory (0700) below TMPDIR, or below /tmp if TMPDIR cannot hold sockets; return its path.

    Raises ChannelError if no directory for temporary files is writable.
    """
    try:
        place = tempfile.gettempdir()
        if len(os.fsencode(place)) > _LONGEST_PLACE or _GLOB & set(place):
            place = "/tmp"  # noqa: S108
        return Path(tempfile.mkdtemp(prefix=prefix, dir=place))
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        raise ChannelError(
            f"no directory for sockets can be made: {where}{error.strerror}. Set TMPDIR to a short path that this user "
            "can write to"
        ) from error
