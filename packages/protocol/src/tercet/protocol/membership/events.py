"""Deliveries of a node: messages, and events of its peers."""

from typing import NamedTuple

import msgspec

from tercet.protocol.messages.messages import Message, Ready
from tercet.protocol.messages.values import Role


class PeerUp(msgspec.Struct, frozen=True):
    """Event: a peer is up and can be sent to. Local, never on the wire."""

    peer: str
    role: Role
    incarnation: str
    features: list[str] = []


class PeerReady(msgspec.Struct, frozen=True):
    """Event: a peer can take work, or its Ready changed. Local, never on the wire."""

    peer: str
    role: Role
    ready: Ready


class PeerDown(msgspec.Struct, frozen=True):
    """Event: a peer is down; messages sent to it and not answered are lost. Local, never on the wire."""

    peer: str
    role: Role
    reason: str


PeerEvent = PeerUp | PeerReady | PeerDown


class Delivery(NamedTuple):
    """Message from a peer with its raw frames, or an event of a peer."""

    source: str
    message: Message | PeerEvent
    frames: tuple[memoryview, ...] = ()
    at: float = 0.0
    """Arrival time of a message, by the node's clock."""


class PeerInfo(NamedTuple):
    """State of a peer that is up."""

    peer: str
    role: Role
    incarnation: str
    ready: Ready | None
