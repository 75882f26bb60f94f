"""Errors between peers.

ProtocolError
├── DecodeError        a frame that is no message of this inbox
├── AddressError       an address that is malformed, too long, or not allowed
├── KeysError          a key that is missing, malformed, or readable by others
├── ChannelError       a socket cannot be bound, or its directory is not private
├── IncompatiblePeer   a peer speaks another major wire version
└── NodeFailed         the thread that serves a node died; its error is the cause
"""


class ProtocolError(Exception):
    """Base class of the errors that this package raises on purpose."""


class DecodeError(ProtocolError):
    """Frame that is no message of this inbox."""


class AddressError(ProtocolError, ValueError):
    """Address that is malformed, too long, or not allowed."""


class KeysError(ProtocolError, ValueError):
    """Key that is missing, malformed, or readable by others."""


class ChannelError(ProtocolError):
    """Socket that cannot be bound, or whose directory is not private."""


class IncompatiblePeer(ProtocolError):  # noqa: N818 - a state of affairs, named as the handshake logs it
    """Peer that speaks another major wire version."""


class NodeFailed(ProtocolError):  # noqa: N818 - a state of affairs, raised when a dead node is drained
    """Death of the thread that serves a node; its error is the cause."""
