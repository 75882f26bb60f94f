"""Round-robin queue over API keys."""

import asyncio
from collections import deque


class RoundRobinQueue:
    """Queue for an exclusive resource, in rotation over keys. All methods run on one event loop."""

    def __init__(self) -> None:
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}
        """Keyed by owner, in the order of their next turns."""

    def __len__(self) -> int:
        return sum(map(len, self._waiting.values()))

    def join(self, owner: str) -> asyncio.Future[None]:
        """Return a future that `next` completes. A waiter that gives up cancels it."""
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(owner, deque()).append(turn)
        return turn

    def next(self) -> bool:
        """Grant the resource to the next waiter. Return False if the queue is empty."""
        while self._waiting:
            owner = next(iter(self._waiting))
            turns = self._waiting.pop(owner)
            turn = turns.popleft()
            if turns:
                self._waiting[owner] = turns  # after all other keys
            if not turn.done():
                turn.set_result(None)
                return True
        return False
