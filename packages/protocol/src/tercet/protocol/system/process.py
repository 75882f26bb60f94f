"""Start of a process, its stop signals, and its end with the supervisor that started it."""

import gc
import logging
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType

logger = logging.getLogger(__name__)

GRACE = 10.0
"""Seconds a process gets to stop by itself once its parent is gone."""


@contextmanager
def gc_disabled_during_imports() -> Iterator[None]:
    """Disable the garbage collector during imports, and freeze the objects that exist at the end.

    Nearly all of them live as long as the process. Collections during imports take a sixth of their time, and later
    collections over these objects would delay everything that the process serves.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def on_signals(
    numbers: Iterable[signal.Signals],
    call: Callable[[], None],
    others: Mapping[signal.Signals, Callable[[], None]] = MappingProxyType({}),
) -> None:
    """Call `call` for each of these signals, at once, in a daemon thread. Must be called in the main thread.

    `others` has the functions of other signals.

    A Python signal handler only runs when the main thread executes bytecode: not while it loads a library, not during a
    wait that began just after the signal came, and two signals in that time count as one.
    """
    chosen = {**dict.fromkeys(numbers, call), **others}
    reader, writer = socket.socketpair()
    writer.setblocking(False)
    for number in chosen:
        signal.signal(number, _leave_to_thread)
    signal.set_wakeup_fd(writer.detach(), warn_on_full_buffer=False)
    threading.Thread(target=_relay, args=(reader, chosen), name="signals", daemon=True).start()


def _leave_to_thread(*_: object) -> None:
    """Replace the signal's default action; the wakeup descriptor has informed the thread already."""


def _relay(reader: socket.socket, calls: Mapping[signal.Signals, Callable[[], None]]) -> None:
    while arrived := reader.recv(64):
        for number in arrived:
            if number in calls:
                try:
                    calls[signal.Signals(number)]()
                except Exception:
                    logger.exception("handler of signal %d failed", number)


def exit_with_parent(fd: int, grace: float = GRACE) -> None:
    """Watch, in a daemon thread, an inherited pipe whose other end only the parent holds.

    When it closes, however the parent died, this process gets SIGTERM, and is killed after `grace` seconds.
    """
    threading.Thread(target=_watch, args=(fd, grace), name="parent-watch", daemon=True).start()


def _watch(fd: int, grace: float) -> None:
    while os.read(fd, 64):
        pass
    os.kill(os.getpid(), signal.SIGTERM)
    threading.Event().wait(grace)
    os._exit(1)
