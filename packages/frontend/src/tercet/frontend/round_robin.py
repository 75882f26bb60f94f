"""A queue in which API keys take turns: one that has much to do does not go before one that has little."""

import asyncio
from collections import deque


class Rotation:
    """Those who wait for something that one at a time may have. All methods run on one event loop."""

    def __init__(self) -> None:
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}
        """The key whose turn is next comes first."""

    def __len__(self) -> int:
        return sum(map(len, self._waiting.values()))

    def join(self, owner: str) -> asyncio.Future[None]:
        """Return a future that `next` completes. Who does not wait any more cancels it."""
        chance: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(owner, deque()).append(chance)
        return chance

    def next(self) -> bool:
        """Let the next one have it. Return False if no one waits."""
        while self._waiting:
            owner = next(iter(self._waiting))
            chances = self._waiting.pop(owner)
            chance = chances.popleft()
            if chances:
                self._waiting[owner] = chances  # behind those of all other keys
            if not chance.done():
                chance.set_result(None)
                return True
        return False
