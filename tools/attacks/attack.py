"""The interface that every module of attacks implements."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

SECONDS = 20.0
"""The longest that an attack may take."""


@dataclass(frozen=True)
class Attack:
    """Requests of one API key that are meant to hold up the requests of others."""

    name: str
    """A short description of the requests, as it stands in the table."""
    run: Callable[[str, str], Awaitable[None]]
    """(base URL, API key of the attacker): sends the requests; returns when they have ended or after `SECONDS`."""
