"""Cost of an all-reduce between two processes on a CPU: alternating shared memory and Gloo.

Run as a program, `collectives.py DIRECTORY` is the second process.
"""

import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median

import torch

from tercet.scheduler.executor.ranks.collectives import TorchCollectives
from tercet.scheduler.executor.ranks.rendezvous import Rendezvous
from tercet.scheduler.executor.ranks.shared_memory import SharedMemoryCollectives
from tercet.scheduler.models.layers.shard import Collectives

Measured = tuple[str, float, str, float | None]
"""(figure, measured, unit, target or None)"""

CASES = [(1, 4096), (32, 4096), (512, 4096)]
ROUNDS, SUMS = 5, 20


def seconds(rank: int, directory: Path) -> dict[tuple[str, int, int], float]:
    """Return the seconds of one bfloat16 sum by kind and shape: medians of rounds that measure every kind."""
    torch.set_num_threads(1)
    kinds: dict[str, Collectives] = {
        "shared memory": SharedMemoryCollectives(rank, 2, directory),
        "Gloo": TorchCollectives(rank, 2, Rendezvous(directory=str(directory)), torch.device("cpu")),
    }
    took: dict[tuple[str, int, int], list[float]] = {}
    for _ in range(ROUNDS):
        for rows, columns in CASES:
            x = torch.ones(rows, columns, dtype=torch.bfloat16)
            for name, collectives in kinds.items():
                collectives.all_reduce(x)
                start = time.perf_counter()
                for _ in range(SUMS):
                    collectives.all_reduce(x)
                took.setdefault((name, rows, columns), []).append((time.perf_counter() - start) / SUMS)
    return {case: median(times) for case, times in took.items()}


def rows() -> Iterator[Measured]:
    """Yield both, and the speed-up of shared memory."""
    with tempfile.TemporaryDirectory() as directory, subprocess.Popen([sys.executable, __file__, directory]):
        took = seconds(0, Path(directory))
    for rows, columns in CASES:
        ours, gloo = (took[name, rows, columns] for name in ("shared memory", "Gloo"))
        yield f"[{rows}, {columns}] in bfloat16, two processes: shared memory", 1e6 * ours, "us", None
        yield f"[{rows}, {columns}] in bfloat16, two processes: Gloo", 1e6 * gloo, "us", None
        yield f"[{rows}, {columns}] in bfloat16, two processes: Gloo over shared memory", gloo / ours, "times", 1


if __name__ == "__main__":
    seconds(1, Path(sys.argv[1]))
