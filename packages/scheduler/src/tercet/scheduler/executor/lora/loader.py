"""A loader that reads adapters before choices with them are planned, so that no step waits for a file."""

from collections.abc import Callable, Collection
from concurrent.futures import Future
from threading import Lock

from tercet.protocol.json_files import error_line
from tercet.protocol.messages.values import LoRAAdapter
from tercet.scheduler.executor.lora.adapter_files import Adapter
from tercet.scheduler.reading_threads import ReadingThreads

_THREADS = 4
"""Threads: a slow download does not keep others from reading local files."""
_TIMEOUT = 120.0
"""Timeout in seconds for reading or downloading an adapter. Then its thread is abandoned."""
_LONGEST_FAULT = 400
MOST_READ = 256


class AdapterLoader:
    """The `AdapterReader` port. `get` may be called from another thread than the rest.

    An adapter stays in memory while a choice uses it, and so do the last `spare` unused ones. At most `most` are in
    memory; further ones wait in a queue until one of these is no longer used.
    """

    def __init__(
        self, read: Callable[[LoRAAdapter], Adapter], spare: int, most: int = MOST_READ, timeout: float = _TIMEOUT
    ) -> None:
        """Keep the `spare` most recently used adapters for later requests, and `most` in all."""
        self._read_files = read
        self._spare = spare
        self._most = most
        self._read: dict[LoRAAdapter, Future[Adapter]] = {}
        """Adapters in memory, the most recently used last."""
        self._queue: dict[LoRAAdapter, None] = {}
        """The queue of adapters whose reading has not started."""
        self._unreported: dict[LoRAAdapter, None] = {}
        """Adapters that `take_read` has not returned yet."""
        self._unloaded: set[LoRAAdapter] = set()
        """Adapters that are not kept for later requests."""
        self._lock = Lock()
        self._threads = ReadingThreads[Adapter](_THREADS, "read adapter", timeout)

    @property
    def busy(self) -> bool:
        """Return whether `take_read` has a result, now or later."""
        return bool(self._unreported)

    def want(self, adapter: LoRAAdapter) -> bool:
        """Return whether an adapter is read; if not, start to. Without a `sha256` it is read again, once for all
        that wait.
        """
        self._unloaded.discard(adapter)
        with self._lock:
            known = self._read.pop(adapter, None)
            if known is not None and (adapter.sha256 or adapter in self._unreported):
                self._read[adapter] = known
            else:
                self._queue.setdefault(adapter)
                self._start()
        if adapter.sha256 and adapter not in self._unreported and self._is_done(adapter):
            return True
        self._unreported[adapter] = None
        return False

    def take_read(self) -> list[LoRAAdapter]:
        """Return adapters for which `want` returned False and that are read, failed or no longer used by now; each
        once.
        """
        read = [each for each in self._unreported if each not in self._queue and self._is_done(each)]
        for each in read:
            del self._unreported[each]
        return read

    def fault(self, adapter: LoRAAdapter) -> str:
        """Return the reason why an adapter that was read cannot be run; empty if it can."""
        reading = self._read.get(adapter)
        error = None if reading is None else reading.exception()
        return "" if error is None else error_line(error, _LONGEST_FAULT)

    def sha256(self, adapter: LoRAAdapter) -> str:
        """Return the SHA-256 of an adapter's files; empty if it was not read, or reading failed."""
        reading = self._read.get(adapter)
        return "" if reading is None or reading.exception() else reading.result().sha256

    def keep(self, wanted: Collection[LoRAAdapter]) -> None:
        """Drop adapters that are not in `wanted`, except up to `spare`, which give way to queued ones."""
        with self._lock:
            for each in [each for each in self._queue if each not in wanted]:
                del self._queue[each]
            over = [
                each
                for each, reading in self._read.items()
                if each not in wanted and each not in self._unreported and reading.done()
            ]
            useful = [
                each for each in over if each.sha256 and each not in self._unloaded and not self._read[each].exception()
            ]
            room = self._most - len(self._read) + len(over) - len(self._queue)
            spared = useful[len(useful) - max(0, min(self._spare, room, len(useful))) :]
            for each in over:
                if each not in spared:
                    del self._read[each]
            self._unloaded &= {*wanted}
            self._start()

    def forget(self, adapter: LoRAAdapter) -> None:
        """Drop an adapter once no choice uses it. Running choices keep it, because its files may be deleted."""
        self._unloaded.add(adapter)

    def get(self, adapter: LoRAAdapter) -> Adapter:
        """Return an adapter, waiting until it is read. Raise AdapterError."""
        with self._lock:
            reading = self._read.get(adapter)
            if reading is None:
                reading = self._read[adapter] = self._threads.submit(self._read_one, adapter)
        return reading.result()

    def close(self) -> None:
        """Stop reading."""
        self._threads.close()

    def _is_done(self, adapter: LoRAAdapter) -> bool:
        """Return whether reading has ended, in success or failure, or the adapter was dropped."""
        reading = self._read.get(adapter)
        return adapter not in self._queue and (reading is None or reading.done())

    def _start(self) -> None:
        """Start reading from the queue while there is room. The caller holds the lock."""
        while self._queue and len(self._read) < self._most:
            adapter = next(iter(self._queue))
            del self._queue[adapter]
            self._read[adapter] = self._threads.submit(self._read_one, adapter)

    def _read_one(self, adapter: LoRAAdapter) -> Adapter:
        """Read an adapter; without a `sha256` in its name, also store it under the hash of its content."""
        read = self._read_files(adapter)
        if not adapter.sha256:
            known: Future[Adapter] = Future()
            known.set_result(read)
            with self._lock:
                self._read.setdefault(LoRAAdapter(adapter.path, read.sha256), known)
        return read
