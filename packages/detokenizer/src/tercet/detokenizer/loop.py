"""Main loop of the detokenizer: connects the manager to the sockets and the clock."""

import logging
from collections import deque
from collections.abc import Callable
from typing import Protocol

from tercet.detokenizer.detokenizer_manager import DetokenizerManager
from tercet.detokenizer.errors import TokenizerError
from tercet.detokenizer.status import StatusBoard
from tercet.detokenizer.tokenizer_store import TokenizerStore
from tercet.protocol.backlog import BacklogSender
from tercet.protocol.messages.messages import AbortReq, BatchTokenIDOutput, Ready, TokenizerFiles, TokenizerFilesReq
from tercet.protocol.messages.values import Role
from tercet.protocol.node import Delivery, PeerDown, PeerUp, Sender

logger = logging.getLogger(__name__)

RETRY_SECONDS = 0.005
"""Seconds between attempts to send a frontend's backlog."""
TOKENIZER_TIMEOUT_SECONDS = 5.0
"""Seconds that a scheduler may take to send its tokenizer before it is asked again."""
MAX_PENDING_BATCHES = 1024
"""Batches of a scheduler that may wait for its tokenizer; beyond it the oldest are dropped, and frontends miss them."""
MIN_DRAIN_SECONDS = 0.5
"""Minimum seconds that a draining process stays while frontends are linked. By then all know that it drains, and
requests they had routed here are held or known to the schedulers."""


class Node(Sender, Protocol):
    """Interface of a started ThreadNode, as the loop uses it."""

    def drain(self, wait: float | None = 0) -> list[Delivery]: ...
    def set_ready(self, ready: Ready) -> None: ...
    def wake(self) -> None: ...


class DetokenizerLoop:
    """Loop that receives messages, passes them to the manager, and sends the results."""

    def __init__(
        self,
        node: Node,
        manager: DetokenizerManager,
        tokenizers: TokenizerStore,
        board: StatusBoard,
        clock: Callable[[], float],
        max_backlog: int,
    ) -> None:
        self._node = node
        self._manager = manager
        self._tokenizers = tokenizers
        self.outbox = BacklogSender(node.send, max_backlog, clock, counters=manager.counters)
        self._board = board
        self._clock = clock
        self._awaited_tokenizers: dict[str, float] = {}
        """Schedulers that have not sent their tokenizer, with the time at which to ask them."""
        self._pending_batches: dict[str, deque[BatchTokenIDOutput]] = {}
        """Batches that came before the tokenizer: a scheduler has a backlog for a detokenizer that was restarted."""
        self._frontends: set[str] = set()
        self._stops = 0

    def run(self, drain_grace: float, min_drain: float = MIN_DRAIN_SECONDS) -> None:
        """Serve until `stop`, then finish the choices held, for `drain_grace` seconds or until a second `stop`."""
        while not self._stops:
            self.turn(self.seconds_until_due())
        self._board.drain()
        began = self._clock()
        busy = True
        while busy and self._stops < 2 and (spent := self._clock() - began) < drain_grace:
            tokens = self.turn(RETRY_SECONDS)
            lingering = bool(self._frontends) and spent < min_drain
            busy = tokens or lingering or bool(self._manager) or bool(self.outbox.backlog)

    def stop(self) -> None:
        """Drain and then end `run`; a second call ends it at once. Call it from one other thread."""
        self._stops += 1
        self._node.wake()

    def seconds_until_due(self) -> float | None:
        """Return the seconds until there is work without a new message; None if no such work is due."""
        if self.outbox.backlog:
            return RETRY_SECONDS
        if self._awaited_tokenizers:
            return max(RETRY_SECONDS, min(self._awaited_tokenizers.values()) - self._clock())
        return None

    def turn(self, wait: float | None) -> bool:
        """Process one round of messages after waiting at most `wait` seconds; return whether there were tokens."""
        deliveries = self._node.drain(wait)
        self._board.begin()
        tokens = False
        for delivery in deliveries:
            tokens |= isinstance(delivery.message, BatchTokenIDOutput)
            self._receive(delivery)
        self.outbox.flush()
        self._request_tokenizers()
        self._board.end()
        return tokens

    def _receive(self, delivery: Delivery) -> None:
        match delivery.message:
            case BatchTokenIDOutput() as output if delivery.source in self._awaited_tokenizers:
                self._pending_batches.setdefault(delivery.source, deque(maxlen=MAX_PENDING_BATCHES)).append(output)
            case BatchTokenIDOutput() as output:
                self._detokenize(output, delivery.source)
            case TokenizerFiles() as files:
                self._load_tokenizer(delivery.source, files, delivery.frames)
            case AbortReq() as abort:
                self._manager.drop_request(delivery.source, abort.rid, abort.indices)
            case PeerUp(peer, Role.SCHEDULER):
                self._awaited_tokenizers[peer] = self._clock()
            case PeerUp(peer, Role.FRONTEND):
                self._frontends.add(peer)
            case PeerDown(peer):
                self._on_peer_down(peer)
            case _:
                pass  # events of peers that the detokenizer does not depend on

    def _detokenize(self, output: BatchTokenIDOutput, scheduler: str) -> None:
        self.outbox.send(self._manager.handle(output, scheduler, self._frontends))

    def _request_tokenizers(self) -> None:
        """Request tokenizers from new schedulers, and again from those that did not answer."""
        now = self._clock()
        for scheduler, due in self._awaited_tokenizers.items():
            if now >= due and self._node.send(scheduler, TokenizerFilesReq(id=f"tokenizer-{scheduler}")):
                self._awaited_tokenizers[scheduler] = now + TOKENIZER_TIMEOUT_SECONDS

    def _load_tokenizer(self, scheduler: str, files: TokenizerFiles, frames: tuple[memoryview, ...]) -> None:
        if self._awaited_tokenizers.pop(scheduler, None) is None:
            return  # not requested, or a second answer
        try:
            self._tokenizers.read(scheduler, files, frames)
        except TokenizerError as error:
            logger.error("tokenizer of scheduler %s is unusable, its tokens get no text: %s", scheduler, error)
        else:
            self._board.loaded()
            self._node.set_ready(Ready())
        for output in self._pending_batches.pop(scheduler, ()):
            self._detokenize(output, scheduler)

    def _on_peer_down(self, peer: str) -> None:
        self._awaited_tokenizers.pop(peer, None)
        self._pending_batches.pop(peer, None)
        self._frontends.discard(peer)
        self._tokenizers.drop_scheduler(peer)
        self.outbox.forget(peer)
        if count := self._manager.drop_peer(peer):
            logger.info("peer %s is down: dropped choices=%d", peer, count)
