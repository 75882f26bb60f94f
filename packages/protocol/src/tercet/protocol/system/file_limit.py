"""How many files and sockets this process may open at a time."""

import contextlib
import resource

from tercet.protocol.errors import ChannelError

LOWEST = 256
"""Descriptors that a part cannot do without: libzmq ends a process that has none left for a connection of a peer."""
_MOST = 65_536
"""Descriptors that are asked for: each idle connection takes some kilobytes, too."""


def raise_file_limit(lowest: int = LOWEST) -> int:
    """Let this process open as many files as it may ask for, `_MOST` at the most. Returns how many it then may open.

    Raises ChannelError for fewer than `lowest`.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MOST if hard == resource.RLIM_INFINITY else min(_MOST, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(ValueError, OSError):  # some systems allow less than they say
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
            soft = wanted
    most = _MOST if soft == resource.RLIM_INFINITY else min(_MOST, soft)
    if most < lowest:
        raise ChannelError(
            f"this process may open {most} files, and needs at least {lowest} for its sockets: raise the limit, "
            f"as with `ulimit -n {lowest}`"
        )
    return most
