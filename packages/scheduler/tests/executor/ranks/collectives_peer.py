"""What each of two processes does with collectives. As a program it is rank 1, in the directory that is named."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tercet.scheduler.executor.ranks.collectives import TorchCollectives
from tercet.scheduler.executor.ranks.rendezvous import Rendezvous
from tercet.scheduler.executor.ranks.shared_memory import SharedMemoryCollectives
from tercet.scheduler.models.layers.shard import Collectives

KINDS: dict[str, Callable[[int, Path], Collectives]] = {
    "gloo": lambda rank, directory: TorchCollectives(
        rank, 2, Rendezvous(directory=str(directory)), torch.device("cpu")
    ),
    "shared memory": lambda rank, directory: SharedMemoryCollectives(rank, 2, directory),
}
SUMMED = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
DTYPES = {**SUMMED, "int64": torch.int64}
EXCHANGED = {"uneven": [[1, 2], [3, 0]], "one way": [[0, 2], [0, 0]], "empty": [[0, 0], [0, 0]]}
"""Numbers of rows that each rank sends to each."""
_LISTENS = "0A"
"""A state of /proc/net/tcp."""


def listening() -> list[str]:
    """Addresses, as the kernel writes them, at which this process listens."""
    targets = (link.readlink() for link in Path("/proc/self/fd").iterdir() if link.is_symlink())
    sockets = {str(target)[8:-1] for target in targets if str(target).startswith("socket:[")}
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/self/net/{table}").read_text(encoding="ascii").splitlines()[1:]:
            fields = line.split()
            if fields[3] == _LISTENS and fields[9] in sockets:
                found.add(fields[1].split(":")[0])
    return sorted(found)


def given(rank: int, dtype: torch.dtype) -> torch.Tensor:
    """[3, 5], of which columns are every second of something wider: views come, too."""
    generator = torch.Generator().manual_seed(10 + rank)
    return (torch.randn(3, 10, generator=generator) * 100).to(dtype)[:, ::2]


def play(rank: int, directory: Path, kind: str) -> dict[str, Any]:
    """What each collective gave, by its name and dtype."""
    collectives = KINDS[kind](rank, directory)
    told: dict[str, Any] = {}
    for name, dtype in DTYPES.items():
        if name in SUMMED:
            told[f"sum {name}"] = collectives.all_reduce(given(rank, dtype).contiguous()).double().tolist()
            told[f"view {name}"] = collectives.all_reduce(given(rank, dtype)).double().tolist()
        told[f"gathered {name}"] = collectives.all_gather(given(rank, dtype)).double().tolist()
        told[f"broadcast {name}"] = collectives.broadcast(given(rank, dtype)).double().tolist()
    if isinstance(collectives, TorchCollectives):
        for kind, numbers in EXCHANGED.items():
            sent, received = numbers[rank], [row[rank] for row in numbers]
            rows = torch.arange(3 * sum(sent)).view(-1, 3).to(torch.uint8) + 100 * rank
            told[f"exchanged {kind}"] = collectives.all_to_all(rows, sent, received).tolist()
    told["smallest"] = [collectives.all_reduce_min(number) for number in (7 - rank, 2**40 + rank, -rank)]
    return told | {"listens": listening()}


if __name__ == "__main__":
    sys.stdout.write(json.dumps(play(1, Path(sys.argv[1]), sys.argv[2])))
