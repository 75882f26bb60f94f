"""`SingleWaiterEvent`: notification of a request's consumer."""

import asyncio


class SingleWaiterEvent:
    """Event for a single waiter. It is set for every token, and costs half as much as asyncio.Event."""

    def __init__(self) -> None:
        self._is_set = False
        self._waiter: asyncio.Future[None] | None = None

    def set(self) -> None:
        """Wake the waiter, or make the next `wait` return at once."""
        self._is_set = True
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def wait(self) -> None:
        """Wait until the event is set, and clear it."""
        if not self._is_set:
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        self._is_set = False
