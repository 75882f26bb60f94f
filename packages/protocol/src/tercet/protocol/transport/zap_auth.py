"""ZeroMQ authentication (ZAP): admits holders of the right keys to a tcp:// inbox.

See https://rfc.zeromq.org/spec/27. The authenticator has no thread: the thread that reads the inbox also answers it,
and until then a client waits.
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
    """ZAP handler, one per context, made before the inbox is bound. An admitted client's user id is the role's name."""

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]", security: Security) -> None:
        self.socket = context.socket(zmq.REP)
        self.socket.linger = 0
        self.socket.bind(_ADDRESS)
        self._security = security

    def answer(self) -> int:
        """Answer all waiting requests; return how many clients were refused."""
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
        self.socket.close()
