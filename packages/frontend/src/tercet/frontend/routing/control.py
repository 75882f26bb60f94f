"""Orders to every scheduler at once, and their answers."""

import asyncio
import itertools
from collections.abc import Callable, Iterable

import msgspec

from tercet.frontend.routing.peers import PeerRegistry
from tercet.protocol.messages.messages import ControlReply, ControlReq
from tercet.protocol.node import Sender

Order = Callable[[str], ControlReq]
"""Makes the message out of its id."""

_PATIENCE = 10.0
"""Seconds for an answer. A scheduler answers between two steps."""


class Answer(msgspec.Struct, frozen=True):
    """What one scheduler said to an order."""

    ok: bool
    message: str = ""
    sha256: str = ""
    """SHA-256 of the adapter that it read."""
    answered: bool = True
    """False if it did not answer; `message` then says why."""


class _Round:
    """One order on its way."""

    def __init__(self, waiting: set[str]) -> None:
        self.waiting = waiting
        self.answers: dict[str, Answer] = {}
        self.complete = asyncio.Event()

    def take(self, peer: str, answer: Answer) -> None:
        """Only the first answer of whoever was asked counts."""
        if peer not in self.waiting:
            return
        self.waiting.discard(peer)
        self.answers[peer] = answer
        if not self.waiting:
            self.complete.set()


class Control:
    """Orders in flight, by id. All methods run on the event loop's thread."""

    def __init__(self, outbox: Sender, fleet: PeerRegistry, patience: float = _PATIENCE) -> None:
        self._outbox = outbox
        self._fleet = fleet
        self._patience = patience
        self._ids = itertools.count()
        self._rounds: dict[str, _Round] = {}

    async def ask(
        self, order: Order, peers: Iterable[str] | None = None, patience: float | None = None
    ) -> dict[str, Answer]:
        """Give an order to those schedulers, or to all. One that leaves or says nothing in time has not obeyed."""
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
        """A scheduler answers."""
        if rounds := self._rounds.get(reply.id):
            rounds.take(source, Answer(reply.ok, reply.message, reply.sha256))

    def gone(self, peer: str) -> None:
        """A scheduler that leaves answers nothing any more."""
        for rounds in self._rounds.values():
            rounds.take(peer, _silent("it is gone"))


def _silent(why: str) -> Answer:
    return Answer(ok=False, message=why, answered=False)
