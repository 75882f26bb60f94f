"""Limit on the files and sockets that this process may open."""

import contextlib
import resource

from tercet.protocol.errors import ChannelError

LOWEST = 256
"""Descriptors that a process needs at least: libzmq aborts when none is left for a peer's connection."""
_MOST = 65_536
"""Descriptors to ask for at most: each idle connection costs some kilobytes, too."""


def raise_file_limit(lowest: int = LOWEST) -> int:
    """Raise this process's limit on open files, up to `_MOST`, and return the new limit.

    Raises ChannelError for fewer than `lowest`.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MOST if hard == resource.RLIM_INFINITY else min(_MOST, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(ValueError, OSError):  # some systems allow less than they report
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
            soft = wanted
    most = _MOST if soft == resource.RLIM_INFINITY else min(_MOST, soft)
    if most < lowest:
        raise ChannelError(
            f"this process may open {most} files, and needs at least {lowest} for its sockets: raise the limit, "
            f"as with `ulimit -n {lowest}`"
        )
    return most
