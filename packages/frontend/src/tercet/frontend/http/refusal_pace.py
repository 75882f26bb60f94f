"""Pace of refusals: a client that is refused and tries again at once waits longer and longer for the next refusal."""

import asyncio

_INTERVAL = 0.02
"""Seconds between two refusals of one API key."""
_BURST = 16
"""Refusals that are answered at once."""


class RefusalPace:
    """The pace at which API keys get refusals for too many requests.

    Each connection and refusal costs a frontend processor time, which steps on the same machine lack. At most
    `most_held` refusals wait; others are answered at once, so that connections are left for other keys.
    """

    def __init__(self, most_held: int) -> None:
        self._most_held = most_held
        self._held = 0
        self._next: dict[str, float] = {}
        """Time of the next refusal on schedule, by key."""

    async def wait(self, owner: str) -> None:
        """Wait until the next refusal of a key is due."""
        if not (delay := self.delay(owner, asyncio.get_running_loop().time())):
            return
        self._held += 1
        try:
            await asyncio.sleep(delay)
        finally:
            self._held -= 1

    def delay(self, owner: str, now: float) -> float:
        """Return the seconds from `now` until the next refusal of a key is due, and schedule the one after it."""
        due = max(self._next.get(owner, 0.0), now - _BURST * _INTERVAL)
        if due > now and self._held >= self._most_held:
            return 0.0
        self._next[owner] = due + _INTERVAL
        return max(due - now, 0.0)
