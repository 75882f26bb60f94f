import platform
import resource
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tercet.kernels.memory import discard, give_back, zeros


@pytest.mark.parametrize("shape", [(3, 5), (4, 1 << 20)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.float32])
def test_memory_is_zero_and_can_be_written(shape: tuple[int, int], dtype: torch.dtype) -> None:
    made = zeros(shape, dtype)
    assert (made.dtype, made.shape, made.is_contiguous()) == (dtype, shape, True)
    assert not made.float().any()
    made[-1, -1] = 1
    assert float(made.float().sum()) == 1


def test_unwritten_memory_is_not_resident() -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    made = zeros((1 << 20, 2048), torch.float32)  # 8 GiB
    made[:1000] = 1
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 1 << 16  # KiB


def test_free_heap_memory_is_returned_to_the_system() -> None:
    if platform.libc_ver()[0] != "glibc":
        pytest.skip("this C library does it by itself, or not at all")
    blocks = [bytearray(100_000) for _ in range(2_000)]  # 200 MB, each too small for a mapping of its own
    last = bytearray(100_000)
    before = resident()
    del blocks
    give_back()
    assert before - resident() > 150e6
    assert len(last) == 100_000


@pytest.mark.parametrize("make", [zeros, lambda shape, dtype: torch.zeros(*shape, dtype=dtype)])
def test_discarded_memory_returns_to_the_system_and_is_zero(make: Callable[..., torch.Tensor]) -> None:
    made = make((1 << 10, 1 << 14), torch.float32)  # 64 MiB
    made.fill_(7)
    address, before = made.data_ptr(), resident()
    discard(made)
    assert before - resident() > 60 << 20
    assert made.data_ptr() == address
    assert not made[1:-1].any()  # the ends may share a page with other memory
    made.fill_(3)
    assert float(made.sum()) == 3 * made.numel()


def resident() -> int:
    """Bytes."""
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * resource.getpagesize()
