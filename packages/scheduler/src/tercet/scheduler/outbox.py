"""What the core says, on its way to peers. A full queue is the peer's problem: the loop neither blocks nor drops."""

from collections import deque
from collections.abc import Callable

from tercet.protocol.messages import Message
from tercet.scheduler.core.config import Arrival, PeerBlocked, PeerDrained
from tercet.scheduler.core.outputs import Outgoing

Send = Callable[[str, Message], bool]
"""Queue a message for a peer; False when its queue is full or it is not linked."""


class Outbox:
    """Sends in order for each peer, keeps what does not go, and tells the core which peers to plan nothing for."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._backlog: dict[str, deque[Message]] = {}
        self._news: list[Arrival] = []

    @property
    def backlog(self) -> int:
        """Messages that wait for their peer."""
        return sum(map(len, self._backlog.values()))

    def send(self, outgoing: list[Outgoing]) -> None:
        """Send, or keep behind what is kept for that peer already."""
        for peer, message in outgoing:
            if peer in self._backlog:
                self._backlog[peer].append(message)
            elif not self._send(peer, message):
                self._backlog[peer] = deque([message])
                self._news.append(Arrival(peer, PeerBlocked(peer)))

    def forget(self, peer: str) -> None:
        """The peer is gone: so is what was kept for it. Its requests come back by another route."""
        if self._backlog.pop(peer, None) is not None:
            self._news.append(Arrival(peer, PeerDrained(peer)))

    def flush(self) -> list[Arrival]:
        """Try again. Returns, for the core, who became blocked or drained since the last call."""
        for peer, kept in list(self._backlog.items()):
            while kept and self._send(peer, kept[0]):
                kept.popleft()
            if not kept:
                del self._backlog[peer]
                self._news.append(Arrival(peer, PeerDrained(peer)))
        news, self._news = self._news, []
        return news
