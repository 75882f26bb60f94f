"""`Wake`: how a request's consumer learns that there is news of it."""

import asyncio


class Wake:
    """An event for one waiter. It is set for every token, and costs half of asyncio's, which may have many."""

    def __init__(self) -> None:
        self._is_set = False
        self._waiter: asyncio.Future[None] | None = None

    def set(self) -> None:
        """There is news."""
        self._is_set = True
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def wait(self) -> None:
        """Return once there is news since the last call. What comes from then on is news for the next."""
        if not self._is_set:
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        self._is_set = False
