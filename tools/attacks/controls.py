"""Loads for comparison: no request at all, only work of other processes on the same cores."""

import asyncio
import time

from tools.attacks.attack import Attack

_SECONDS = 0.05


async def busy_core(url: str, key: str) -> None:  # noqa: ARG001
    """Keep one core busy at the priority of the other attacks, which share the machine's cores with the server."""
    while True:
        end = time.monotonic() + _SECONDS
        while time.monotonic() < end:
            pass
        await asyncio.sleep(0)


ATTACKS = (Attack("one core busy, no request (for comparison)", busy_core),)
