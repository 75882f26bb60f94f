"""The frontends that share this one's socket: whichever is asked for /metrics answers for all of them."""

import asyncio
import itertools
import logging
from collections.abc import Callable, Iterable

from tercet.frontend.manager.series import check_series
from tercet.protocol.messages.messages import MetricsReq, Series
from tercet.protocol.node import Sender

logger = logging.getLogger(__name__)

_PATIENCE = 1.0
"""Seconds for an answer, which takes some milliseconds. Prometheus gives a scrape ten seconds unless told otherwise."""


class PeerMetrics:
    """Questions in flight, by id. `own` answers those of others. All methods run on the event loop's thread."""

    def __init__(
        self, outbox: Sender, peers: Iterable[str], own: Callable[[str], Series], patience: float = _PATIENCE
    ) -> None:
        self._outbox = outbox
        self._peers = frozenset(peers)
        self._own = own
        self._patience = patience
        self._ids = itertools.count()
        self._asked: dict[str, dict[str, asyncio.Future[Series | None]]] = {}

    async def series(self) -> dict[str, Series]:
        """What each counts, by peer id. One that is not up, or says nothing in time, is left out."""
        number, loop = f"series-{next(self._ids)}", asyncio.get_running_loop()
        message = MetricsReq(id=number)
        asked = {peer: loop.create_future() for peer in self._peers if self._outbox.send(peer, message)}
        self._asked[number] = asked
        try:
            if asked:
                await asyncio.wait(asked.values(), timeout=self._patience)
        finally:
            del self._asked[number]
        return {peer: each.result() for peer, each in asked.items() if each.done() and each.result() is not None}

    def on_request(self, source: str, request: MetricsReq) -> None:
        """A sibling is asked for /metrics. Nobody else gets an answer."""
        if source in self._peers:
            self._outbox.send(source, self._own(request.id))

    def on_series(self, source: str, series: Series) -> None:
        """Only the first answer of whoever was asked counts."""
        answer = self._asked.get(series.id, {}).get(source)
        if answer is None or answer.done():
            return
        try:
            check_series(series)
        except ValueError as error:
            logger.error("%s counts what makes no sense: %s", source, error)
            answer.set_result(None)
        else:
            answer.set_result(series)

    def gone(self, peer: str) -> None:
        """Whoever leaves answers nothing any more."""
        for asked in self._asked.values():
            if (answer := asked.get(peer)) and not answer.done():
                answer.set_result(None)
