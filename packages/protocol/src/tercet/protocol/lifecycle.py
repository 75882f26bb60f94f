"""How a part ends with the supervisor that started it."""

import os
import signal
import threading

GRACE = 10.0
"""Seconds a part gets to stop by itself once its parent is gone."""


def exit_with_parent(fd: int, grace: float = GRACE) -> None:
    """Watch an inherited pipe, whose other end only the parent holds, from a daemon thread.

    When it closes, however the parent died, this process gets SIGTERM, and after `grace` seconds it is ended.
    """
    threading.Thread(target=_watch, args=(fd, grace), name="parent-watch", daemon=True).start()


def _watch(fd: int, grace: float) -> None:
    while os.read(fd, 64):
        pass
    os.kill(os.getpid(), signal.SIGTERM)
    threading.Event().wait(grace)
    os._exit(1)
