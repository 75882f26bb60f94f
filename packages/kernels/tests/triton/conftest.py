"""Triton's kernels run on the GPU where there is one, and otherwise in Triton's interpreter on the CPU."""

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from tercet.kernels.device import default_device
from tercet.kernels.triton import missing_triton


@pytest.fixture(scope="session")
def device() -> torch.device:
    device = default_device()
    if missing := missing_triton(device):
        pytest.skip(missing)
    return device


@pytest.fixture(autouse=True)
def _like_a_gpu() -> Iterator[None]:
    """The same numbers every time, and no word from the interpreter's numpy where a GPU would say inf or NaN."""
    torch.manual_seed(0)
    with np.errstate(all="ignore"):
        yield


@pytest.fixture
def unwritten_is_no_number() -> Iterator[None]:
    """Memory that nobody has written holds what would show in a result."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)
