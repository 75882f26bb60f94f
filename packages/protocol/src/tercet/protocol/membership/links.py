"""What the table of peers is made of, and what it asks of its node.

The life of a link to one address:

    DIALLING    we say Hello, every interval, until it is answered
    ANSWERING   its Hello came; ours, a reply, has yet to get away
    UP          either way round: the peer can be sent to
    ALIAS       a peer that is up answered from here, but wants to be reached elsewhere: nothing is said while it lives
    REFUSING    its Hello came and cannot be accepted; ours and a Goodbye have yet to get away
"""

from dataclasses import dataclass
from enum import Enum, auto
from typing import NamedTuple

from tercet.protocol.membership.events import PeerEvent
from tercet.protocol.messages.messages import Hello, Message, Ready

FIRST_PAUSE = 0.005
"""Seconds until a Hello that found no connection is tried again; doubles up to the interval."""


class Say(NamedTuple):
    """Send a message to an address, under an envelope for that incarnation. Report back with `PeerTable.said`."""

    address: str
    target: str
    message: Message


class Close(NamedTuple):
    """Close the socket to an address; what it queued is discarded."""

    address: str


class Refused(NamedTuple):
    """Count that a peer was turned away, and tell the operator."""

    peer: str
    reason: str
    again: bool = False
    """This start of it was turned away before: nothing new to tell."""


Effect = Say | Close | Refused | PeerEvent


class LinkState(Enum):
    """See the head of the file."""

    DIALLING = auto()
    ANSWERING = auto()
    UP = auto()
    ALIAS = auto()
    REFUSING = auto()


@dataclass(slots=True)
class Link:
    """One address that we dial or that dialled us, and how far we got with it."""

    address: str
    state: LinkState
    next_try: float
    pause: float = FIRST_PAUSE
    expires: float | None = None
    greeted: bool = False
    """A Hello of ours got away."""
    unsaid: float | None = None
    """Since when none does."""
    hello: Hello | None = None
    """The peer's own, from ANSWERING on."""
    reason: str = ""
    """Why it is refused."""

    def __str__(self) -> str:
        peer = f" {self.hello.peer}" if self.hello else ""
        return f"{self.state.name.lower()}{peer} at {self.address}, {'' if self.greeted else 'not '}greeted"


@dataclass(slots=True)
class Peer:
    """A peer that is up."""

    hello: Hello
    heard: float
    features: frozenset[str]
    ready: Ready | None = None
    told_at: float | None = None
    """When our Ready last got away to it."""
    lost: float | None = None
    """When the connection to it broke."""


@dataclass(frozen=True)
class Timing:
    """How long a node waits for what, in seconds."""

    interval: float = 0.25
    silence: float = 2.0
    lost: float = 0.125
    """A broken connection that is not back by then means that the process is gone."""
    retell: float = 0.05
    """Until a Ready that did not get away is tried again."""
