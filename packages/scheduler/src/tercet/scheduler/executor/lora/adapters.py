"""The adapters of a worker: loaded from files, installed in a bank's slots, and referenced by the rows of a step."""

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch

from tercet.kernels.ops.lora import LONGEST_RUN, LoRARows, Segment
from tercet.protocol.json_files import error_line
from tercet.protocol.messages.values import LoRAAdapter
from tercet.scheduler.async_loader import MOST_LOADED, AsyncLoader, ReadingThreads
from tercet.scheduler.core.places.loads import AdapterLoad
from tercet.scheduler.core.plan import Row, SlotInit
from tercet.scheduler.device.staging import Array, HostToDevice
from tercet.scheduler.executor.lora.adapter_files import Adapter, read_adapter
from tercet.scheduler.models.layers.lora import LoRABank

_NONE = -1
_READ_BYTES = 4 << 30
"""Maximum host memory of loaded adapters, unless the adapter slots need more."""
_THREADS = 4
"""Threads: a slow download does not keep others from reading local files."""
_TIMEOUT = 120.0
"""Timeout in seconds for reading or downloading an adapter. Then its thread is abandoned."""
_LONGEST_ERROR = 400

AdapterLoader = AsyncLoader[LoRAAdapter, Adapter]


def adapter_loader_of(bank: LoRABank) -> AdapterLoader:
    """Return a loader of adapters that fit a bank."""
    some = next(iter(bank.weights.values()))
    read = partial(
        read_adapter,
        targets=bank.targets,
        most=some.rank,
        dtype=some.a.dtype,
        architecture=bank.architecture,
        held=bank.weights.keys(),
    )
    places = len(bank.ranks)
    most = max(2 * places, min(MOST_LOADED, _READ_BYTES * places // bank.bytes))
    return adapter_loader(read, spare=places, most=most)


def adapter_loader(
    read: Callable[[LoRAAdapter], Adapter], spare: int, most: int = MOST_LOADED, timeout: float = _TIMEOUT
) -> AdapterLoader:
    """Return a loader of adapters. One requested without a hash is read again, and stored under its hash as well."""
    return AsyncLoader(
        read,
        ReadingThreads(_THREADS, "read adapter", timeout),
        most=most,
        spare=spare,
        alias=lambda adapter, read: adapter if adapter.sha256 else LoRAAdapter(adapter.path, read.sha256),
        reloads=lambda adapter: not adapter.sha256,
        describe=partial(error_line, longest=_LONGEST_ERROR),
    )


class StepAdapters:
    """The adapters of a `ModelRunner`'s steps."""

    def __init__(self, bank: LoRABank, slots: int, device: torch.device, loader: AdapterLoader | None = None) -> None:
        """Create it for a bank; `loader` is the loader of an equal bank that this one replaces."""
        self.loader = loader or adapter_loader_of(bank)
        self._bank = bank
        self._places = np.full(slots, _NONE)  # adapter slot of each slot, or _NONE
        self._last: tuple[list[Segment], LoRARows] | None = None
        self._to_device = HostToDevice(device)
        self._table = torch.zeros(slots, 3, dtype=torch.int32, device=device)
        """A segment for each row of a decode, read by CUDA graphs."""
        self._written_slots: list[int] | None = None
        """The adapter slots in `_table`, row by row."""

    def load(self, loads: Sequence[AdapterLoad]) -> None:
        """Install adapters in their slots. Raise AdapterError for one that cannot be read."""
        for place, adapter in ((load.place, load.adapter) for load in loads):
            read = self.loader.get(adapter).result()
            self._bank.install(place, read.layers, read.rank)
        if loads:
            self._last = None

    def introduce(self, inits: Sequence[SlotInit]) -> None:
        """Store the adapter of each new choice."""
        for init in inits:
            self._places[init.slot] = init.adapter

    def rows(self, rows: Sequence[Row]) -> LoRARows | None:
        """Return the segments of a step's tokens that have an adapter; None if no token has one."""
        places = self._places[[row.slot for row in rows]].tolist()
        if max(places) == _NONE:
            return None
        runs = _runs(places, [row.count for row in rows])
        if self._last is None or self._last[0] != runs:  # consecutive decodes mostly have the same segments
            [table] = self._to_device.send([np.array(runs, dtype=np.int32)])
            longest = max(run.stop - run.start for run in runs)
            self._last = runs, LoRARows(runs, table, list(self._bank.ranks), longest)
        return self._last[1]

    def decode_rows(self, rows: int) -> LoRARows:
        """Return the adapters of a decode of `rows` rows, in the fixed memory that `write_decode_rows` writes."""
        return LoRARows(None, self._table[:rows], self._bank.ranks, longest=1)

    def write_decode_rows(self, slots: Array) -> None:
        """Write the adapters of a decode's slots, row by row; further rows get none."""
        places = self._places[slots].tolist()
        if places == self._written_slots:
            return
        table = np.zeros((len(self._table), 3), dtype=np.int32)
        table[:, 1] = table[:, 2] = np.arange(len(table))
        adapted = [row for row, place in enumerate(places) if place != _NONE]
        table[adapted, 0] = [places[row] for row in adapted]
        table[adapted, 2] += 1
        self._table.copy_(self._to_device.send([table])[0])
        self._written_slots = places

    def clear_decode_rows(self) -> None:
        """Remove all adapters from the table: the last step's may name slots that are empty by now."""
        self.write_decode_rows(np.zeros(0, dtype=np.int64))

    def close(self) -> None:
        """Stop reading."""
        self.loader.close()


def _runs(places: Sequence[int], counts: Sequence[int]) -> list[Segment]:
    """Return the segments of rows with the given token counts, in the order of tokens."""
    whole: list[Segment] = []
    start = 0
    for place, count in zip(places, counts, strict=True):
        if whole and whole[-1].slot == place:
            whole[-1] = whole[-1]._replace(stop=start + count)
        else:
            whole.append(Segment(place, start, start + count))
        start += count
    return [
        Segment(place, first, min(first + LONGEST_RUN, stop))
        for place, start, stop in whole
        if place != _NONE
        for first in range(start, stop, LONGEST_RUN)
    ]
