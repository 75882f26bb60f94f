"""What a node hands to its part: messages, and what happened to its peers."""

from typing import NamedTuple

import msgspec

from tercet.protocol.messages.messages import Message, Ready
from tercet.protocol.messages.values import Role


class PeerUp(msgspec.Struct, frozen=True):
    """A peer can be sent to from here on. Local: never on the wire."""

    peer: str
    role: Role
    incarnation: str
    features: list[str] = []


class PeerReady(msgspec.Struct, frozen=True):
    """A peer can take work, or what it said of itself changed. Local: never on the wire."""

    peer: str
    role: Role
    ready: Ready


class PeerDown(msgspec.Struct, frozen=True):
    """A peer is gone; what was sent to it and not answered is lost. Local: never on the wire."""

    peer: str
    role: Role
    reason: str


PeerEvent = PeerUp | PeerReady | PeerDown


class Delivery(NamedTuple):
    """One thing from one peer: a message with its raw frames, or an event."""

    source: str
    message: Message | PeerEvent
    frames: tuple[memoryview, ...] = ()
    at: float = 0.0
    """When a message came, by the node's clock."""


class PeerInfo(NamedTuple):
    """A peer as it stands."""

    peer: str
    role: Role
    incarnation: str
    ready: Ready | None
