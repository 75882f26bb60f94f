"""Metrics of the frontends that share one socket: the one that is scraped collects from all others."""

import asyncio
import itertools
import logging
from collections.abc import Callable, Iterable

from tercet.frontend.manager.series import check_series
from tercet.protocol.messages.messages import MetricsReq, Series
from tercet.protocol.node import Sender

logger = logging.getLogger(__name__)

_TIMEOUT = 1.0
"""Seconds to wait for an answer, which takes milliseconds. Prometheus' default scrape timeout is 10 s."""


class PeerMetrics:
    """Collector of peers' metrics. `own` returns this frontend's series. Runs on the event loop's thread."""

    def __init__(
        self, outbox: Sender, peers: Iterable[str], own: Callable[[str], Series], timeout: float = _TIMEOUT
    ) -> None:
        self._outbox = outbox
        self._peers = frozenset(peers)
        self._own = own
        self._timeout = timeout
        self._ids = itertools.count()
        self._pending: dict[str, dict[str, asyncio.Future[Series | None]]] = {}

    async def series(self) -> dict[str, Series]:
        """Return each peer's series by peer id, without peers that are down or do not answer in time."""
        number, loop = f"series-{next(self._ids)}", asyncio.get_running_loop()
        message = MetricsReq(id=number)
        pending = {peer: loop.create_future() for peer in self._peers if self._outbox.send(peer, message)}
        self._pending[number] = pending
        try:
            if pending:
                await asyncio.wait(pending.values(), timeout=self._timeout)
        finally:
            del self._pending[number]
        return {peer: each.result() for peer, each in pending.items() if each.done() and each.result() is not None}

    def on_message(self, source: str, message: MetricsReq | Series) -> None:
        if isinstance(message, MetricsReq):
            self.on_request(source, message)
        else:
            self.on_series(source, message)

    def on_request(self, source: str, request: MetricsReq) -> None:
        """Answer a peer's request for this frontend's series; requests of other senders are ignored."""
        if source in self._peers:
            self._outbox.send(source, self._own(request.id))

    def on_series(self, source: str, series: Series) -> None:
        """Record the first answer of each peer that was asked; reject invalid series."""
        answer = self._pending.get(series.id, {}).get(source)
        if answer is None or answer.done():
            return
        try:
            check_series(series)
        except ValueError as error:
            logger.error("%s: invalid metrics, leaving them out: %s", source, error)
            answer.set_result(None)
        else:
            answer.set_result(series)

    def on_peer_down(self, peer: str) -> None:
        """Stop waiting for a peer that went down."""
        for pending in self._pending.values():
            if (answer := pending.get(peer)) and not answer.done():
                answer.set_result(None)
