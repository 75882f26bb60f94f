"""What can go wrong between peers.

ProtocolError
├── DecodeError        a frame is no message of this inbox
├── AddressError       an address is malformed, too long, or not allowed
├── KeysError          a key is missing, malformed, or within others' reach
├── ChannelError       a socket cannot be bound, or its directory is not private
├── IncompatiblePeer   a peer speaks another major wire version
└── NodeFailed         the thread that serves a node died; its error is the cause
"""


class ProtocolError(Exception):
    """Anything this package raises on purpose."""


class DecodeError(ProtocolError):
    """A frame is no message of this inbox."""


class AddressError(ProtocolError, ValueError):
    """An address is malformed, too long, or not allowed."""


class KeysError(ProtocolError, ValueError):
    """A key is missing, malformed, or within others' reach."""


class ChannelError(ProtocolError):
    """A socket cannot be bound, or its directory is not private."""


class IncompatiblePeer(ProtocolError):  # noqa: N818 - a state of affairs, named as the handshake logs it
    """A peer speaks another major wire version."""


class NodeFailed(ProtocolError):  # noqa: N818 - a state of affairs, raised to whoever drains a dead node
    """The thread that serves a node died; its error is the cause."""
