"""By which names a server may be called that asks for no key and that only this machine reaches.

Any page may call it, and browsers keep answers from pages of other origins. But whoever owns a name can have it lead
to 127.0.0.1 once its page is loaded (DNS rebinding): then the page and this server are of one origin. What tells it
from a client of this machine is the name in the Host header.
"""

import ipaddress
from collections.abc import Iterable
from urllib.parse import urlsplit

from starlette.datastructures import Headers

from tercet.frontend.config.validation import ANY
from tercet.frontend.errors import ForbiddenError

_NOBODYS = (".localhost", ".internal")
"""Ends of names that nobody can own, and that a container may call its host by."""
_SHOWN = 64


class AllowedHosts:
    """Addresses, names that nobody can own, and those of `origins` whose pages may read answers anyway."""

    def __init__(self, origins: Iterable[str] = ()) -> None:
        given = tuple(origins)
        self._any = ANY in given
        self._names = {urlsplit(origin).hostname for origin in given}

    def check(self, headers: Headers) -> None:
        """Raises ForbiddenError for a request that calls the server by another name. One without any is no page's."""
        name = _name(headers.get("host", ""))
        if self._any or name in self._names or _is_safe(name):
            return
        raise ForbiddenError(
            "This server asks for no key and is for this machine alone, so it answers by its address or as localhost, "
            f"not as {name[:_SHOWN]!r}. Start it with --api-key, or with the page's origin as --allowed-origin.",
            code="unknown_host",
        )


def _name(host: str) -> str:
    """Of a Host header, without its port."""
    name = host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0]
    return name.strip().rstrip(".").lower()


def _is_safe(name: str) -> bool:
    if "." not in name and ":" not in name:  # of this machine or its network, where no page comes from
        return True
    if name.endswith(_NOBODYS):
        return True
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
