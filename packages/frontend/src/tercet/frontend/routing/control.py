"""Control requests that are broadcast to schedulers, and the collection of their replies."""

import asyncio
import itertools
from collections.abc import Callable, Iterable

import msgspec

from tercet.frontend.routing.peers import PeerRegistry
from tercet.protocol.messages.messages import ControlReply, ControlReq
from tercet.protocol.node import Sender

Order = Callable[[str], ControlReq]
"""Creates the message from the request id."""

_PATIENCE = 10.0
"""Seconds to wait for a reply. Schedulers reply between two steps."""


class Answer(msgspec.Struct, frozen=True):
    """Reply of one scheduler to a control request."""

    ok: bool
    message: str = ""
    sha256: str = ""
    """SHA-256 of the adapter that the scheduler read."""
    answered: bool = True
    """False if the scheduler did not reply; `message` then has the reason."""


class _Round:
    """Control request in flight."""

    def __init__(self, waiting: set[str]) -> None:
        self.waiting = waiting
        self.answers: dict[str, Answer] = {}
        self.complete = asyncio.Event()

    def take(self, peer: str, answer: Answer) -> None:
        """Record the first answer of a scheduler that was asked; ignore others."""
        if peer not in self.waiting:
            return
        self.waiting.discard(peer)
        self.answers[peer] = answer
        if not self.waiting:
            self.complete.set()


class Control:
    """Control requests in flight, by id. All methods run on the event loop's thread."""

    def __init__(self, outbox: Sender, fleet: PeerRegistry, patience: float = _PATIENCE) -> None:
        self._outbox = outbox
        self._fleet = fleet
        self._patience = patience
        self._ids = itertools.count()
        self._rounds: dict[str, _Round] = {}

    async def ask(
        self, order: Order, peers: Iterable[str] | None = None, patience: float | None = None
    ) -> dict[str, Answer]:
        """Send a request to the given schedulers, by default all, and collect their answers.

        A scheduler that leaves or does not reply in time counts as failed, with `answered` unset.
        """
        number = f"control-{next(self._ids)}"
        message = order(number)
        rounds = self._rounds[number] = _Round(set(self._fleet.schedulers if peers is None else peers))
        for peer in list(rounds.waiting):
            if not self._outbox.send(peer, message):
                rounds.take(peer, _silent("it cannot be reached"))
        try:
            if rounds.waiting:
                async with asyncio.timeout(self._patience if patience is None else patience):
                    await rounds.complete.wait()
        except TimeoutError:
            for peer in list(rounds.waiting):
                rounds.take(peer, _silent("it has not answered"))
        finally:
            del self._rounds[number]
        return rounds.answers

    def on_reply(self, source: str, reply: ControlReply) -> None:
        if rounds := self._rounds.get(reply.id):
            rounds.take(source, Answer(reply.ok, reply.message, reply.sha256))

    def gone(self, peer: str) -> None:
        """Record a failure for a scheduler that went down."""
        for rounds in self._rounds.values():
            rounds.take(peer, _silent("it is gone"))


def _silent(why: str) -> Answer:
    return Answer(ok=False, message=why, answered=False)
