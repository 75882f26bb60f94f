"""Loader of grammars, adapters and weights in threads, so that no step waits for one."""

import threading
from collections import deque
from collections.abc import Callable, Collection
from concurrent.futures import Executor, Future
from typing import Any, Generic, TypeVar

from tercet.protocol.json_files import error_line

K = TypeVar("K")
T = TypeVar("T")
V_co = TypeVar("V_co", covariant=True)

MOST_LOADED = 256
"""Maximum values in memory; further keys wait until others are no longer needed."""
_MOST_LOST = 64
"""Limit of abandoned threads. A file system that does not answer may keep each of them."""


class AsyncLoader(Generic[K, V_co]):
    """Values by key, each loaded once for all that request it. Only `get` may be called from another thread.

    A value stays in memory while a choice needs it, and so do the last `spare` unneeded ones.
    """

    def __init__(
        self,
        load: Callable[[K], V_co],
        threads: Executor,
        *,
        most: int = MOST_LOADED,
        spare: int = 0,
        known: Callable[[K], V_co | None] = lambda _: None,
        alias: Callable[[K, Any], K] = lambda key, _: key,
        reloads: Callable[[K], bool] = lambda _: False,
        describe: Callable[[BaseException], str] = error_line,
    ) -> None:
        """Create a loader.

        `known` returns a value that needs no loading, and `alias` a second key under which a loaded value is stored.
        `reloads` returns whether each request loads the key's value again; requests that wait share one load.
        `describe` returns the error of a failed load as a message for the sender of the request.
        """
        self._load = load
        self._threads = threads
        self._most = most
        self._spare = spare
        self._known = known
        self._alias = alias
        self._reloads = reloads
        self._describe = describe
        self._values: dict[K, Future[V_co]] = {}
        """Values in memory, the most recently used last."""
        self._queue: dict[K, None] = {}
        """Keys whose loading has not started."""
        self._unreported: dict[K, None] = {}
        """Requested keys that `pop_loaded` has not returned yet."""
        self._unloaded: set[K] = set()
        """Keys whose values are not kept for later requests."""
        self._lock = threading.Lock()

    @property
    def busy(self) -> bool:
        """Return whether `pop_loaded` will return keys, now or later."""
        return bool(self._unreported)

    def request(self, key: K) -> bool:
        """Return whether a value is loaded or has failed. If not, load it; `pop_loaded` reports the end.

        The end of a load that each request repeats is always reported.
        """
        reloads = self._reloads(key)
        self._unloaded.discard(key)
        with self._lock:
            value = self._values.pop(key, None)
            if value is not None and (key in self._unreported or not reloads):
                self._values[key] = value
            elif key not in self._queue and (known := self._known(key)) is not None:
                self._values[key] = _completed(known)
            else:
                self._queue.setdefault(key)
                self._start()
        if self._is_over(key) and not reloads:
            return True
        self._unreported[key] = None
        return False

    def pop_loaded(self) -> list[K]:
        """Return requested keys whose values are loaded, failed or no longer needed by now; each is returned once."""
        over = [each for each in self._unreported if self._is_over(each)]
        for each in over:
            del self._unreported[each]
        return over

    def value_of(self, key: K) -> V_co | None:
        """Return a loaded value; None if it is not in memory."""
        value = self._values.get(key)
        return None if value is None or not value.done() or value.exception() else value.result()

    def error_of(self, key: K) -> str:
        """Return why loading failed; empty while no error is known."""
        value = self._values.get(key)
        error = value.exception() if value is not None and value.done() else None
        return "" if error is None else self._describe(error)

    def retain(self, needed: Collection[K]) -> None:
        """Drop all other values, except `spare`, which give way to queued keys, and those not reported yet."""
        with self._lock:
            for each in [each for each in self._queue if each not in needed]:
                del self._queue[each]
            over = [
                each
                for each, value in self._values.items()
                if each not in needed and each not in self._unreported and value.done()
            ]
            room = self._most - len(self._values) + len(over) - len(self._queue)
            useful = [each for each in over if self._is_useful(each)]
            spared = useful[len(useful) - max(0, min(self._spare, room, len(useful))) :]
            for each in over:
                if each not in spared:
                    del self._values[each]
            self._unloaded &= {*needed}
            self._start()

    def unload(self, key: K) -> None:
        """Drop a value once it is no longer needed, rather than keep it as a spare one."""
        self._unloaded.add(key)

    def get(self, key: K) -> Future[V_co]:
        """Return the future of a value, which is loaded now if it was never requested."""
        with self._lock:
            value = self._values.get(key)
            if value is None:
                value = self._values[key] = self._threads.submit(self._load_one, key)
            return value

    def close(self) -> None:
        """Load nothing more."""
        self._threads.shutdown(cancel_futures=True)

    def _is_over(self, key: K) -> bool:
        """Return whether loading has ended, in success or failure, or the key was dropped."""
        value = self._values.get(key)
        return key not in self._queue and (value is None or value.done())

    def _is_useful(self, key: K) -> bool:
        """Return whether the next request could use a loaded value."""
        return not self._reloads(key) and key not in self._unloaded and not self._values[key].exception()

    def _start(self) -> None:
        """Start loading from the queue while there is room. The caller holds the lock."""
        while self._queue and len(self._values) < self._most:
            key = next(iter(self._queue))
            del self._queue[key]
            self._values[key] = self._threads.submit(self._load_one, key)

    def _load_one(self, key: K) -> V_co:
        value = self._load(key)
        other = self._alias(key, value)
        if other != key:
            with self._lock:
                self._values.setdefault(other, _completed(value))
        return value


def _completed(value: T) -> Future[T]:
    future: Future[T] = Future()
    future.set_result(value)
    return future


class ReadTimeoutError(TimeoutError):
    """A read that did not end in time. The message is one line for clients."""


class ReadingThreads(Executor):
    """At most `most` threads for reading unchecked files. A call of more than `patience` seconds is abandoned.

    Its future then raises ReadTimeoutError, another thread takes the place of its own, and neither `shutdown` nor the
    end of the process waits for it. Submitted calls wait for a free thread in order.
    """

    def __init__(self, most: int, name: str, patience: float) -> None:
        self._most = most
        self._name = name
        self._patience = patience
        self._line: deque[tuple[Future[Any], Callable[[], Any]]] = deque()
        self._running = 0
        self._lost = 0
        self._closed = False
        self._lock = threading.Lock()

    def submit(self, call: Callable[..., T], /, *given: Any, **named: Any) -> Future[T]:
        """Return the future of a call. Thread-safe."""
        future: Future[T] = Future()
        with self._lock:
            self._line.append((future, lambda: call(*given, **named)))
        self._start_more()
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:  # noqa: ARG002
        """Start no more calls, and cancel the queued ones. Running calls continue, and are not waited for."""
        with self._lock:
            self._closed = True
            waiting = [future for future, _ in self._line]
            self._line.clear()
        for future in waiting:
            future.cancel()

    def _start_more(self) -> None:
        while True:
            with self._lock:
                if not self._line or self._running >= self._most or self._closed:
                    return
                future, call = self._line.popleft()
                stuck = self._lost >= _MOST_LOST
                self._running += not stuck
            if stuck:
                future.set_exception(ReadTimeoutError(f"{_MOST_LOST} reads before this one have not ended"))
            elif future.set_running_or_notify_cancel():
                _Reading(self, future, call)
            else:
                self._ended()

    def _ended(self, *, late: bool = False) -> None:
        with self._lock:
            if late:
                self._lost -= 1
            else:
                self._running -= 1
        self._start_more()

    def _gave_up(self) -> None:
        with self._lock:
            self._running -= 1
            self._lost += 1
        self._start_more()


class _Reading(Generic[T]):
    """A call in a thread of its own, and a timer that abandons it."""

    def __init__(self, threads: ReadingThreads, future: Future[T], call: Callable[[], T]) -> None:
        self._threads = threads
        self._future = future
        self._call = call
        self._lock = threading.Lock()
        self._over = False
        self._timer = threading.Timer(threads._patience, self._give_up)
        self._timer.daemon = True
        self._timer.start()
        threading.Thread(target=self._run, name=threads._name, daemon=True).start()

    def _run(self) -> None:
        result: T
        try:
            result = self._call()
        except BaseException as error:  # raised to the caller of `result`
            self._finish(lambda error=error: self._future.set_exception(error))  # type: ignore[misc]
        else:
            self._finish(lambda: self._future.set_result(result))

    def _finish(self, settle: Callable[[], None]) -> None:
        if first := self._is_first():
            self._timer.cancel()
            settle()
        self._threads._ended(late=not first)

    def _give_up(self) -> None:
        if self._is_first():
            self._future.set_exception(
                ReadTimeoutError(f"its files were not read within {self._threads._patience:g} s")
            )
            self._threads._gave_up()

    def _is_first(self) -> bool:
        """Return whether the future has no result or exception yet."""
        with self._lock:
            first, self._over = not self._over, True
        return first
