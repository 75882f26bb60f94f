"""Protection against DNS rebinding for a server that needs no key and listens on this machine only.

Any web page may send requests to it, and browsers withhold the responses from pages of other origins. But the owner of
a name can point it at 127.0.0.1 after the page has loaded (DNS rebinding); page and server then share one origin. The
name in the Host header distinguishes such a page from a client on this machine.
"""

import ipaddress
from collections.abc import Iterable
from urllib.parse import urlsplit

from starlette.datastructures import Headers

from tercet.frontend.config.validation import ANY
from tercet.frontend.errors import ForbiddenError

_UNREGISTRABLE = (".localhost", ".internal")
"""Suffixes of names that cannot be registered, and that a container may use for its host."""
_MAX_SHOWN = 64


class AllowedHosts:
    """Allowed Host headers: addresses, names that cannot be registered, and the hosts of `origins`."""

    def __init__(self, origins: Iterable[str] = ()) -> None:
        given = tuple(origins)
        self._any = ANY in given
        self._names = {urlsplit(origin).hostname for origin in given}

    def check(self, headers: Headers) -> None:
        """Raise ForbiddenError for a request with another name in its Host header.

        A request without one does not come from a web page.
        """
        name = _name(headers.get("host", ""))
        if self._any or name in self._names or _is_safe(name):
            return
        raise ForbiddenError(
            "This server asks for no key and is for this machine alone, so it answers by its address or as localhost, "
            f"not as {name[:_MAX_SHOWN]!r}. Start it with --api-key, or with the page's origin as --allowed-origin.",
            code="unknown_host",
        )


def _name(host: str) -> str:
    """Return the name in a Host header, without the port."""
    name = host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0]
    return name.strip().rstrip(".").lower()


def _is_safe(name: str) -> bool:
    if "." not in name and ":" not in name:  # a name of this machine or its network, from which no page is served
        return True
    if name.endswith(_UNREGISTRABLE):
        return True
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
