"""Files of the loads of experts: written by rank 0, and read for the placement of experts.

A file is a JSON object whose `logical_count` has a list for each layer, with the number of tokens of each expert. The
list of a layer without experts is empty.
"""

import os
import time
from collections.abc import Mapping
from pathlib import Path

import msgspec

from tercet.scheduler.config import ConfigError
from tercet.scheduler.executor.worker_options import WorkerOptions
from tercet.scheduler.models.layers.expert_parallel.group import ExpertLoads
from tercet.scheduler.models.layers.expert_parallel.placement import Placement

_INTERVAL = 60.0
"""Seconds between two versions of a file."""
_MOST_BYTES = 1 << 24


class _Loads(msgspec.Struct, frozen=True):
    logical_count: tuple[tuple[int, ...], ...]


class LoadFile:
    """The file to which rank 0 writes the loads since its start."""

    def __init__(self, path: Path, loads: ExpertLoads) -> None:
        self._path = path
        self._loads = loads
        self._written = time.monotonic()

    def write_if_due(self) -> None:
        """Write the file if it is older than a minute."""
        if time.monotonic() - self._written > _INTERVAL:
            self.write()

    def write(self) -> None:
        """Replace the file. Raise OSError."""
        self._written = time.monotonic()
        counts = self._loads.counts()
        rows = tuple(tuple(counts.get(layer, ())) for layer in range(1 + max(counts, default=-1)))
        new = self._path.with_name(f"{self._path.name}.new")
        new.write_bytes(msgspec.json.encode(_Loads(rows)))
        os.replace(new, self._path)


def read_loads(path: Path) -> tuple[tuple[int, ...], ...]:
    """Return the loads in a file, by layer and expert. Raise ConfigError for another file."""
    try:
        with path.open("rb") as file:
            loads = msgspec.json.decode(file.read(_MOST_BYTES), type=_Loads).logical_count
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"--init-expert-location {path}: no file of expert loads: {error}") from error
    if any(load < 0 for row in loads for load in row):
        raise ConfigError(f"--init-expert-location {path}: a load is below 0")
    return loads


def placements_of(options: WorkerOptions) -> Mapping[int, Placement]:
    """Return the placement of each layer with loads. Raise ValueError if experts find no place."""
    size, redundant = options.expert_parallel_size, options.redundant_experts
    rows = enumerate(options.expert_loads)
    return {layer: Placement.balanced(loads, size, redundant) for layer, loads in rows if loads}
