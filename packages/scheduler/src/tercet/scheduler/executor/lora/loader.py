"""`AdapterLoader`: reads adapters before the choices that have them are planned, so that no step waits for a file."""

from collections.abc import Callable, Collection
from concurrent.futures import Future
from threading import Lock

from tercet.protocol.json_files import error_line
from tercet.protocol.messages.values import LoRAAdapter
from tercet.scheduler.executor.lora.adapter_files import Adapter
from tercet.scheduler.reading_threads import ReadingThreads

_THREADS = 4
"""A download that takes long keeps nobody from reading files that are here."""
_PATIENCE = 120.0
"""Seconds to read an adapter, or to fetch it. Then its thread is given up."""
_LONGEST_FAULT = 400
MOST_READ = 256


class AdapterLoader:
    """The `AdapterReader` port. `get` may be called in another thread than the rest.

    An adapter is kept in memory while a choice has it; the last `spare` others stay, too. At most `most` are in memory;
    further ones wait in line until one of these is no longer wanted.
    """

    def __init__(
        self, read: Callable[[LoRAAdapter], Adapter], spare: int, most: int = MOST_READ, patience: float = _PATIENCE
    ) -> None:
        """`spare` adapters are kept for requests to come, the last used ones; `most` are kept in all."""
        self._read_files = read
        self._spare = spare
        self._most = most
        self._read: dict[LoRAAdapter, Future[Adapter]] = {}
        """Those last wanted are last."""
        self._line: dict[LoRAAdapter, None] = {}
        """Those that nobody has begun to read."""
        self._unread: dict[LoRAAdapter, None] = {}
        """Those of which nobody has been told yet that they are read."""
        self._unloaded: set[LoRAAdapter] = set()
        """Those that are not kept for requests to come."""
        self._lock = Lock()
        self._threads = ReadingThreads[Adapter](_THREADS, "read adapter", patience)

    @property
    def busy(self) -> bool:
        """Whether `take_read` has something to tell, now or later."""
        return bool(self._unread)

    def want(self, adapter: LoRAAdapter) -> bool:
        """Whether an adapter is read; if not, begin. One without a `sha256` is read anew, once for all who wait."""
        self._unloaded.discard(adapter)
        with self._lock:
            known = self._read.pop(adapter, None)
            if known is not None and (adapter.sha256 or adapter in self._unread):
                self._read[adapter] = known
            else:
                self._line.setdefault(adapter)
                self._begin()
        if adapter.sha256 and adapter not in self._unread and self._is_over(adapter):
            return True
        self._unread[adapter] = None
        return False

    def take_read(self) -> list[LoRAAdapter]:
        """Adapters for which `want` said False and that are now read, failed or no longer wanted; each is told once."""
        read = [each for each in self._unread if each not in self._line and self._is_over(each)]
        for each in read:
            del self._unread[each]
        return read

    def fault(self, adapter: LoRAAdapter) -> str:
        """Why an adapter that was read cannot be run; empty if it can."""
        reading = self._read.get(adapter)
        error = None if reading is None else reading.exception()
        return "" if error is None else error_line(error, _LONGEST_FAULT)

    def sha256(self, adapter: LoRAAdapter) -> str:
        """The SHA-256 of an adapter's files; empty if it was not read, or reading it failed."""
        reading = self._read.get(adapter)
        return "" if reading is None or reading.exception() else reading.result().sha256

    def keep(self, wanted: Collection[LoRAAdapter]) -> None:
        """Forget what is read and not wanted, but for up to `spare` adapters, which give way to those in line."""
        with self._lock:
            for each in [each for each in self._line if each not in wanted]:
                del self._line[each]
            over = [
                each
                for each, reading in self._read.items()
                if each not in wanted and each not in self._unread and reading.done()
            ]
            useful = [
                each for each in over if each.sha256 and each not in self._unloaded and not self._read[each].exception()
            ]
            room = self._most - len(self._read) + len(over) - len(self._line)
            spared = useful[len(useful) - max(0, min(self._spare, room, len(useful))) :]
            for each in over:
                if each not in spared:
                    del self._read[each]
            self._unloaded &= {*wanted}
            self._begin()

    def forget(self, adapter: LoRAAdapter) -> None:
        """Do not keep it once no choice has it. Choices that are here keep it: its files may be gone."""
        self._unloaded.add(adapter)

    def get(self, adapter: LoRAAdapter) -> Adapter:
        """The adapter, once it is read; waits, and begins to read it if `want` never did. Raises AdapterError."""
        with self._lock:
            reading = self._read.get(adapter)
            if reading is None:
                reading = self._read[adapter] = self._threads.submit(self._read_one, adapter)
        return reading.result()

    def close(self) -> None:
        """Read no more."""
        self._threads.close()

    def _is_over(self, adapter: LoRAAdapter) -> bool:
        """Whether it is read, with whatever success, or forgotten."""
        reading = self._read.get(adapter)
        return adapter not in self._line and (reading is None or reading.done())

    def _begin(self) -> None:
        """Read what is first in line, as long as there is room. Called with the lock."""
        while self._line and len(self._read) < self._most:
            adapter = next(iter(self._line))
            del self._line[adapter]
            self._read[adapter] = self._threads.submit(self._read_one, adapter)

    def _read_one(self, adapter: LoRAAdapter) -> Adapter:
        """What was read at a path is known by its contents, too."""
        read = self._read_files(adapter)
        if not adapter.sha256:
            known: Future[Adapter] = Future()
            known.set_result(read)
            with self._lock:
                self._read.setdefault(LoRAAdapter(adapter.path, read.sha256), known)
        return read
