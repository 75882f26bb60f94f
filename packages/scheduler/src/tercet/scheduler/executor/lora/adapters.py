"""The adapters of a worker: loaded from files, installed in a bank's slots, and referenced by the rows of a step."""

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch

from tercet.kernels.ops.lora import LONGEST_RUN, LoRARows, Segment, grouped, longest_segment, most_segments
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

    def __init__(
        self,
        bank: LoRABank,
        slots: int,
        device: torch.device,
        loader: AdapterLoader | None = None,
        *,
        sort: bool | None = None,
    ) -> None:
        """Create it for a bank; `loader` is the loader of an equal bank that this one replaces.

        With `sort` (default: on a GPU), every step's table has tokens sorted by adapter, as those of graphs always do:
        kernels are compiled for sorted tokens or for others.
        """
        self.loader = loader or adapter_loader_of(bank)
        self._bank = bank
        self._sorts = device.type == "cuda" if sort is None else sort
        self._places = np.full(slots, _NONE)  # adapter slot of each slot, or _NONE
        self._last: tuple[list[Segment], LoRARows] | None = None
        self._to_device = HostToDevice(device)
        self._decodes = torch.zeros(4 * slots, dtype=torch.int32, device=device)
        """The table of a decode's segments and the order of its rows, read by CUDA graphs."""
        self._table, self._order = self._decodes[: 3 * slots].view(slots, 3), self._decodes[3 * slots :]
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
        if max(places, default=_NONE) == _NONE:
            return None
        runs = _runs(places, [row.count for row in rows])
        if self._last is None or self._last[0] != runs:  # consecutive decodes mostly have the same segments
            self._last = runs, self._rows_of(runs, np.repeat(places, [row.count for row in rows]))
        return self._last[1]

    def _rows_of(self, runs: list[Segment], slots: Array) -> LoRARows:
        """Return the segments of tokens with these adapter slots."""
        ranks = list(self._bank.ranks)
        if self._sorts:
            *arrays, longest = grouped(slots)
            table, order = self._to_device.send(arrays)
            return LoRARows(runs, table, ranks, longest, order)
        [table] = self._to_device.send([np.array(runs, dtype=np.int32)])
        return LoRARows(runs, table, ranks, max(run.stop - run.start for run in runs))

    def decode_rows(self, rows: int) -> LoRARows:
        """Return the adapters of a decode of `rows` rows, in the fixed memory that `write_decode_rows` writes."""
        ranks = self._bank.ranks
        table = self._table[: most_segments(rows, len(ranks))]
        return LoRARows(None, table, ranks, longest_segment(rows), self._order[:rows])

    def write_decode_rows(self, slots: Array, rows: int = 0) -> None:
        """Write the adapters of a decode's slots, for a graph of `rows` rows; further rows get none."""
        places = [*self._places[slots].tolist(), *[_NONE] * (rows - len(slots))]
        if places == self._written_slots:
            return
        table, order, _ = grouped(np.array(places, dtype=np.int64))
        content = np.zeros(len(self._decodes), dtype=np.int32)
        content[: table.size] = table.ravel()
        content[3 * len(self._order) :][: len(order)] = order
        self._decodes.copy_(self._to_device.send([content])[0])
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
