"""How a process starts, is told to stop, and ends with the supervisor that started it."""

import gc
import logging
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

logger = logging.getLogger(__name__)

GRACE = 10.0
"""Seconds a part gets to stop by itself once its parent is gone."""


@contextmanager
def gc_disabled_during_imports() -> Iterator[None]:
    """For imports: no garbage is collected within, and what is there at the end is never looked at again.

    It is much, and nearly all of it stays for good. Collections on the way take a sixth of the time of imports, and
    later ones would hold up everything that the process serves.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def on_signals(numbers: Iterable[signal.Signals], call: Callable[[], None]) -> None:
    """Have `call` called for each of these signals, at once and from a daemon thread. For the main thread to set up.

    A handler in Python only runs when the main thread is back in Python: not while it loads a library, not during a
    wait that began just after the signal came, and two signals in that time are one to it.
    """
    chosen = frozenset(numbers)
    reader, writer = socket.socketpair()
    writer.setblocking(False)
    for number in chosen:
        signal.signal(number, _leave_to_thread)
    signal.set_wakeup_fd(writer.detach(), warn_on_full_buffer=False)
    threading.Thread(target=_relay, args=(reader, chosen, call), name="signals", daemon=True).start()


def _leave_to_thread(*_: object) -> None:
    """The system's own way with the signal is replaced; the thread has been told already."""


def _relay(reader: socket.socket, numbers: frozenset[int], call: Callable[[], None]) -> None:
    while arrived := reader.recv(64):
        for number in arrived:
            if number in numbers:
                try:
                    call()
                except Exception:
                    logger.exception("signal %d was not heeded", number)


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
