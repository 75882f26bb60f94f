"""Control requests that are broadcast to schedulers, and the collection of their replies."""

import asyncio
import itertools
from collections.abc import Callable, Iterable, Sequence

import msgspec

from tercet.frontend.routing.peers import PeerRegistry
from tercet.protocol.messages.codec import Frame
from tercet.protocol.messages.messages import ControlReply, ControlReq
from tercet.protocol.messages.profiles import ProfileReq
from tercet.protocol.messages.weight_transfers import WeightTransferReq
from tercet.protocol.node import Sender

Order = Callable[[str], ControlReq | WeightTransferReq | ProfileReq]
"""Creates the message from the request id."""

_TIMEOUT = 10.0
"""Seconds to wait for a reply. Schedulers reply between two steps."""


class Answer(msgspec.Struct, frozen=True):
    """Reply of one scheduler to a control request."""

    ok: bool
    message: str = ""
    sha256: str = ""
    """SHA-256 of the adapter that the scheduler read."""
    answered: bool = True
    """False if the scheduler did not reply; `message` then has the reason."""


class _PendingControl:
    """Control request in flight."""

    def __init__(self, waiting: set[str]) -> None:
        self.waiting = waiting
        self.answers: dict[str, Answer] = {}
        self.complete = asyncio.Event()

    def record(self, peer: str, answer: Answer) -> None:
        """Record the first answer of a scheduler that was asked; ignore others."""
        if peer not in self.waiting:
            return
        self.waiting.discard(peer)
        self.answers[peer] = answer
        if not self.waiting:
            self.complete.set()


class Control:
    """Control requests in flight, by id. All methods run on the event loop's thread."""

    def __init__(self, outbox: Sender, fleet: PeerRegistry, timeout: float = _TIMEOUT) -> None:
        self._outbox = outbox
        self._fleet = fleet
        self._timeout = timeout
        self._ids = itertools.count()
        self._pending: dict[str, _PendingControl] = {}

    async def broadcast(
        self,
        order: Order,
        peers: Iterable[str] | None = None,
        seconds: float | None = None,
        frames: Sequence[Frame] = (),
    ) -> dict[str, Answer]:
        """Send a request with its frames to the given schedulers, by default all, and collect their answers.

        A scheduler that leaves or does not reply in time counts as failed, with `answered` unset.
        """
        number = f"control-{next(self._ids)}"
        message = order(number)
        pending = self._pending[number] = _PendingControl(set(self._fleet.schedulers if peers is None else peers))
        for peer in list(pending.waiting):
            if not self._outbox.send(peer, message, *frames):
                pending.record(peer, _failure("it cannot be reached, or does not know the request"))
        try:
            if pending.waiting:
                async with asyncio.timeout(self._timeout if seconds is None else seconds):
                    await pending.complete.wait()
        except TimeoutError:
            for peer in list(pending.waiting):
                pending.record(peer, _failure("it has not answered"))
        finally:
            del self._pending[number]
        return pending.answers

    def on_reply(self, source: str, reply: ControlReply) -> None:
        if pending := self._pending.get(reply.id):
            pending.record(source, Answer(reply.ok, reply.message, reply.sha256))

    def on_peer_down(self, peer: str) -> None:
        """Record a failure for a scheduler that went down."""
        for pending in self._pending.values():
            pending.record(peer, _failure("it is gone"))


def _failure(why: str) -> Answer:
    return Answer(ok=False, message=why, answered=False)
