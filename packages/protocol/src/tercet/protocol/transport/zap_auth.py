"""Lets holders of the right keys in. ZeroMQ asks it, within the process, about every client of a tcp:// inbox (ZAP).

See https://rfc.zeromq.org/spec/27. It has no thread of its own: whoever reads the inbox also answers at the door, and
until then a client waits outside.
"""

import contextlib

import zmq

from tercet.protocol.transport.security import Security

DOMAIN = "tercet"
_ADDRESS = "inproc://zeromq.zap.01"
_VERSION = b"1.0"
_CURVE = b"CURVE"
_FRAMES = 7
"""version, request id, domain, address, identity, mechanism, the client's public key"""


class ZapAuthenticator:
    """One to a context, made before the inbox is bound. What it lets in carries the role's name as its user id."""

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]", security: Security) -> None:
        self.socket = context.socket(zmq.REP)
        self.socket.linger = 0
        self.socket.bind(_ADDRESS)
        self._security = security

    def answer(self) -> int:
        """Answer everybody who waits; never waits itself. Returns how many were turned away."""
        turned_away = 0
        with contextlib.suppress(zmq.Again):
            while True:
                turned_away += not self._answer(self.socket.recv_multipart(zmq.NOBLOCK))
        return turned_away

    def _answer(self, request: list[bytes]) -> bool:
        role = None
        if len(request) == _FRAMES and request[0] == _VERSION and request[5] == _CURVE:
            role = self._security.role_of(request[6])
        request_id = request[1] if len(request) > 1 else b""
        if role is None:
            verdict = [b"400", b"no key of a role that may talk here", b""]
        else:
            verdict = [b"200", b"", role.value.encode()]
        self.socket.send_multipart([_VERSION, request_id, *verdict, b""], zmq.NOBLOCK)
        return role is not None

    def close(self) -> None:
        """Let nobody in any more."""
        self.socket.close()
