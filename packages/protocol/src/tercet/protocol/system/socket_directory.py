"""New private directories for ipc:// sockets, with paths short enough for them."""

import os
import tempfile
from pathlib import Path

from tercet.protocol.errors import ChannelError

_LONGEST_PLACE = 40
"""Bytes: a socket's path may have 107, directory and all."""
_GLOB = frozenset("*?[")
"""Characters that addresses of peers give another meaning to."""


def new_socket_directory(prefix: str) -> Path:
    """Make a directory (0700) below TMPDIR, or below /tmp where TMPDIR cannot hold sockets.

    Raises ChannelError where no directory for temporary files can be written to.
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
