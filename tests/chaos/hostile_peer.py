"""Peer that sends every message its role may send, and many invalid ones."""

import contextlib
import os
import random
import socket
from collections.abc import Iterator
from pathlib import Path
from types import UnionType
from typing import Any, cast

import msgspec
import zmq

from tercet.protocol.messages.codec import Envelope, encode_envelope
from tercet.protocol.messages.messages import DetokenizerInbox, FrontendInbox, Heartbeat, SchedulerInbox
from tercet.protocol.messages.values import Phase, Role, pack_floats, pack_ints
from tercet.protocol.node import NodeConfig, PeerDown, PeerUp, ThreadNode

GOLDEN = Path(__file__).parents[2] / "packages/protocol/tests/messages/golden/wire-1.1.txt"
INBOXES: dict[Role, UnionType] = {
    Role.FRONTEND: FrontendInbox,
    Role.SCHEDULER: SchedulerInbox,
    Role.DETOKENIZER: DetokenizerInbox,
}
RIGHTFUL = {
    *("Hello", "Introduce", "Ready", "Goodbye", "DecodeSpec", "Envelope", "#"),
    *("PauseGenerationReq", "ReleaseMemoryReq", "InitWeightsUpdateGroupReq", "StartProfileReq"),
}
"""Messages that a member may send, such as accepting requests without answering, and classes that are no messages."""
HARMLESS: dict[str, dict[str, Any]] = {
    "TokenizedGenerateReqInput": {"alone": False, "hold": False},
    "TokenizedEmbeddingReqInput": {"alone": False, "hold": False},
    "AbortReq": {"asked": False},
}
"""Fields by which a member may legitimately delay others."""
INTS = [-(2**63), -(2**31), -1, 0, 1, 5, 2**31 - 1, 2**31, 2**63 - 1, 2**64 - 1]
FLOATS = [float("nan"), float("inf"), float("-inf"), -1.0, 0.0, 1e-9, 1e39, 1e308]
TEXTS = ["", "\0", "x" * 600, "é" * 9, "../../x", "frontend-0", "scheduler-0", "detokenizer-0", "tcp://127.0.0.1:1"]


def samples() -> dict[str, Any]:
    """Return every message by its name, as plain values."""
    lines = [line.split() for line in GOLDEN.read_text().splitlines()]
    return {line[0]: msgspec.msgpack.decode(bytes.fromhex(line[1])) for line in lines if line[0] not in RIGHTFUL}


def changed(value: Any, chance: random.Random) -> Any:
    """Return another value of the same type, mostly an invalid one."""
    match value:
        case bool():
            return not value
        case int():
            return chance.choice(INTS)
        case float():
            return chance.choice(FLOATS)
        case str():
            return chance.choice(TEXTS)
        case bytes():
            numbers = [chance.randrange(-5, 3000) for _ in range(chance.randrange(6))]
            return chance.choice([b"", b"\1", value * 2, value[:-1], pack_ints(numbers), pack_floats([float("nan")])])
        case list():
            return chance.choice([[], value * 2, value * 100, value[:1], [None]])
        case dict():
            return chance.choice([{}, {changed(key, chance): each for key, each in value.items()}])
        case _:
            return chance.choice([None, 0, "x"])


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Yield every (container, key) within a value except the message's name."""
    pairs = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, each in pairs:
        if key != "type":
            yield value, key
            yield from places(each)


class HostilePeer:
    """Node of a role, with additional sockets that send messages under its name that a node would not send."""

    def __init__(self, listen: str, role: Role, chance: random.Random) -> None:
        self._name = f"{role}-hostile"
        self._directory = listen.removeprefix("ipc://")
        self._chance = chance
        self._samples = samples()
        others = tuple(f"{listen}/{other}-[0-9]*" for other in INBOXES if other is not role)
        config = NodeConfig(role, self._name, listen, connect=others)
        self._node = ThreadNode(config, INBOXES[role], lambda _: Heartbeat(phase=Phase.IDLE))
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._sockets: dict[str, zmq.Socket[bytes]] = {}
        self._peers: dict[str, str] = {}
        self.said = 0
        """Number of messages sent."""
        self._node.start()

    def close(self) -> None:
        """Leave in the regular way."""
        for each in self._sockets.values():
            each.close(linger=0)
        self._context.term()
        self._node.close("said enough")

    def peers(self) -> dict[str, str]:
        """Return the incarnations of the parts that are linked with it."""
        for _, message, *_ in self._node.drain():
            match message:
                case PeerUp(peer, _, incarnation):
                    self._peers[peer] = incarnation
                case PeerDown(peer):
                    self._peers.pop(peer, None)
        return self._peers

    def talk(self, count: int) -> None:
        """Send `count` messages to each part, and some bytes that are no messages."""
        for peer, incarnation in self.peers().items():
            path = f"{self._directory}/{peer}.{incarnation}.ipc"
            if path not in self._sockets:
                self._sockets[path] = self._context.socket(zmq.PUSH)
                self._sockets[path].connect(f"ipc://{path}")
            envelope = Envelope(source=self._name, incarnation=self._node.incarnation, target=incarnation)
            for _ in range(count):
                rest = [os.urandom(self._chance.randrange(99)) for _ in range(self._chance.randrange(3))]
                frames = (
                    [encode_envelope(envelope), self._message(), *rest]
                    if self._chance.random() < 0.95
                    else rest or [b""]
                )
                with contextlib.suppress(zmq.Again):
                    self._sockets[path].send_multipart(frames, zmq.NOBLOCK)
                    self.said += 1
            with socket.socket(socket.AF_UNIX) as plain, contextlib.suppress(OSError):
                plain.connect(path)
                plain.sendall(os.urandom(self._chance.randrange(200)))

    def _message(self) -> bytes:
        """Return a message of any role with up to three changes."""
        name = self._chance.choice(list(self._samples))
        message = cast("dict[str, Any]", msgspec.msgpack.decode(msgspec.msgpack.encode(self._samples[name])))
        if "rid" in message:
            message |= {"rid": f"{self._name}-{self._chance.randrange(20)}", "attempt": self._chance.randrange(20)}
        for _ in range(self._chance.randrange(4)):
            container, key = self._chance.choice(list(places(message)))
            container[key] = changed(container[key], self._chance)
        message |= HARMLESS.get(name, {})
        try:
            return msgspec.msgpack.encode(message)
        except (OverflowError, TypeError):
            return b"\xc1"
