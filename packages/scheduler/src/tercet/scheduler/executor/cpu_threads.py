"""How many threads torch uses on a CPU."""

import torch

from tercet.kernels.native.library import available_cores


def limit_torch(threads: int | None) -> None:
    """As many as are given; else no more than this process has cores for: torch sees no container's quota."""
    torch.set_num_threads(threads or min(torch.get_num_threads(), available_cores()))
