"""Links, peers and effects of the peer table.

States of a link to one address:

    DIALLING    a Hello is sent every interval, until it is answered
    ANSWERING   a Hello came from there; the reply could not be sent yet
    UP          both Hellos are exchanged: the peer can be sent to
    ALIAS       a peer that is up answered from here, but is reached at another address: not dialled while it lives
    REFUSING    a Hello came that cannot be accepted; the reply and a Goodbye could not be sent yet
"""

from dataclasses import dataclass
from enum import Enum, auto
from typing import NamedTuple

from tercet.protocol.membership.events import PeerEvent
from tercet.protocol.messages.messages import Hello, Message, Ready

FIRST_PAUSE = 0.005
"""Seconds until a Hello that found no connection is retried; doubles up to the interval."""


class Send(NamedTuple):
    """Effect: send a message to an address, to that incarnation; report with `PeerTable.send_result`."""

    address: str
    target: str
    message: Message


class Close(NamedTuple):
    """Effect: close the socket to an address; its queue is discarded."""

    address: str


class Refused(NamedTuple):
    """Effect: count that a peer was refused, and log it."""

    peer: str
    reason: str
    again: bool = False
    """True if this incarnation was refused before: nothing new to log."""


Effect = Send | Close | Refused | PeerEvent


class LinkState(Enum):
    """State of a link; the module docstring describes the states."""

    DIALLING = auto()
    ANSWERING = auto()
    UP = auto()
    ALIAS = auto()
    REFUSING = auto()


@dataclass(slots=True)
class Link:
    """Link to one address that this node dials or that dialled it."""

    address: str
    state: LinkState
    next_try: float
    pause: float = FIRST_PAUSE
    expires: float | None = None
    hello_sent: bool = False
    """A Hello of this node was sent."""
    unsent_since: float | None = None
    """Time since which no Hello could be sent; None if the last one was."""
    hello: Hello | None = None
    """The peer's Hello, from ANSWERING on."""
    reason: str = ""
    """Reason of a refusal."""

    def __str__(self) -> str:
        peer = f" peer={self.hello.peer}" if self.hello else ""
        return f"{self.address} state={self.state.name.lower()}{peer} hello_sent={'yes' if self.hello_sent else 'no'}"


@dataclass(slots=True)
class Peer:
    """Peer that is up."""

    hello: Hello
    last_message: float
    features: frozenset[str]
    ready: Ready | None = None
    ready_sent_at: float | None = None
    """Time at which this node's Ready was last sent to it."""
    lost_at: float | None = None
    """Time at which its connection broke."""


@dataclass(frozen=True)
class Timing:
    """Timeouts of a node, in seconds."""

    interval: float = 0.25
    silence: float = 2.0
    reconnect: float = 0.125
    """A broken connection that is not back after this time means that the process is dead."""
    ready_retry: float = 0.05
    """Pause before a Ready that could not be sent is retried."""
