"""Cost of the exchanges between two processes of a model on a CPU: sums, all-to-all, and from stage to stage.

Sums alternate shared memory and Gloo; all others are Gloo's. Run as a program, `collectives.py DIRECTORY` is the second
process.
"""

import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median

import torch

from tercet.scheduler.executor.ranks.collectives import TorchCollectives, TorchStageLinks
from tercet.scheduler.executor.ranks.rendezvous import Rendezvous
from tercet.scheduler.executor.ranks.shared_memory import SharedMemoryCollectives
from tercet.scheduler.models.layers.shard import Split

Measured = tuple[str, float, str, float | None]
"""(figure, measured, unit, target or None)"""

CASES = [(1, 4096), (32, 4096), (512, 4096)]
ROUNDS, SUMS = 5, 20


def exchanges(rank: int, directory: Path) -> dict[str, Callable[[torch.Tensor], object]]:
    """Return the exchanges of a rank by name; return once both ranks have met."""
    rendezvous, cpu = Rendezvous(directory=str(directory)), torch.device("cpu")
    shared = SharedMemoryCollectives(rank, 2, directory)
    gloo = TorchCollectives(rank, 2, rendezvous, cpu)
    links = TorchStageLinks(rank, Split(1, 2), rendezvous, cpu)

    def to_experts(x: torch.Tensor) -> object:
        """Send half of the rows to each rank."""
        sent = [len(x) // 2, len(x) - len(x) // 2]
        return gloo.all_to_all(x, sent, [sent[rank]] * 2)

    return {
        "sum, shared memory": shared.all_reduce,
        "sum, Gloo": gloo.all_reduce,
        "all-to-all, Gloo": to_experts,
        "to the next stage, Gloo": links.send if rank else links.receive,
    }


def seconds(rank: int, directory: Path) -> dict[tuple[str, int, int], float]:
    """Return the seconds of an exchange by kind and shape: medians of rounds that measure every kind."""
    torch.set_num_threads(1)
    kinds = exchanges(rank, directory)
    took: dict[tuple[str, int, int], list[float]] = {}
    for _ in range(ROUNDS):
        for rows, columns in CASES:
            x = torch.ones(rows, columns, dtype=torch.bfloat16)
            for name, exchange in kinds.items():
                exchange(x)
                start = time.perf_counter()
                for _ in range(SUMS):
                    exchange(x)
                took.setdefault((name, rows, columns), []).append((time.perf_counter() - start) / SUMS)
    kinds["sum, Gloo"](torch.ones(1))  # the other process has received all
    return {case: median(times) for case, times in took.items()}


def rows() -> Iterator[Measured]:
    """Yield the time of each exchange, and the speed-up of sums by shared memory."""
    with tempfile.TemporaryDirectory() as directory, subprocess.Popen([sys.executable, __file__, directory]):
        took = seconds(0, Path(directory))
    for rows, columns in CASES:
        of_shape = {name: each for (name, *shape), each in took.items() if shape == [rows, columns]}
        for name, each in of_shape.items():
            yield f"[{rows}, {columns}] in bfloat16, two processes: {name}", 1e6 * each, "us", None
        gain = of_shape["sum, Gloo"] / of_shape["sum, shared memory"]
        yield f"[{rows}, {columns}] in bfloat16: sum, Gloo over shared memory", gain, "times", 1


if __name__ == "__main__":
    seconds(1, Path(sys.argv[1]))
