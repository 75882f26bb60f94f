"""Loads for comparison: no request at all, only work of other processes on the same cores."""

import asyncio
import multiprocessing
import os
import time

from tools.attacks.attack import Attack

_SECONDS = 0.05


def _work() -> None:
    end = time.monotonic() + _SECONDS
    while time.monotonic() < end:
        pass


def _work_while(parent: int) -> None:
    """Keep a core busy until the parent has ended, which may be killed."""
    while os.getppid() == parent:
        _work()


async def busy_core(url: str, key: str) -> None:  # noqa: ARG001
    """Keep one core busy at the priority of the other attacks, which share the machine's cores with the server."""
    while True:
        _work()
        await asyncio.sleep(0)


async def busy_cores(url: str, key: str) -> None:
    """Keep two cores busy, as an attacker and the frontend that it attacks do."""
    multiprocessing.Process(target=_work_while, args=(os.getpid(),)).start()
    await busy_core(url, key)


ATTACKS = (
    Attack("one core busy, no request (for comparison)", busy_core),
    Attack("two cores busy, no request (for comparison)", busy_cores),
)
