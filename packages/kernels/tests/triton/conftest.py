"""Triton's kernels run on the GPU where there is one, and otherwise in Triton's interpreter on the CPU."""

import os
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from packages.kernels.tests.forks import Forks
from tercet.kernels.device import default_device
from tercet.kernels.triton import missing_triton


@pytest.fixture(scope="session")
def device() -> torch.device:
    device = default_device()
    if missing := missing_triton(device):
        pytest.skip(missing)
    return device


@pytest.fixture(scope="session")
def compiling() -> Iterator[Forks]:
    """Yield forks of a process that compiles kernels, as this one may hold interpreted ones."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    forks = Forks("tercet.kernels.tools.compiling", "tercet.kernels.tools.launch_specs", env=environment)
    yield forks
    forks.close()


@pytest.fixture(autouse=True)
def _like_a_gpu() -> Iterator[None]:
    """Fix the random seed, and silence numpy's warnings of overflows, which a GPU does not report."""
    torch.manual_seed(0)
    with np.errstate(all="ignore"):
        yield


@pytest.fixture
def nan_in_unwritten_memory() -> Iterator[None]:
    """Fill uninitialized memory with NaN, which would show in a result."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)
