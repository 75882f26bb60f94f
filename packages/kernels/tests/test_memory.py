import resource

import pytest
import torch

from tercet.kernels.memory import zeros


@pytest.mark.parametrize("shape", [(3, 5), (4, 1 << 20)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.float32])
def test_memory_is_zero_and_can_be_written(shape: tuple[int, int], dtype: torch.dtype) -> None:
    made = zeros(shape, dtype)
    assert (made.dtype, made.shape, made.is_contiguous()) == (dtype, shape, True)
    assert not made.float().any()
    made[-1, -1] = 1
    assert float(made.float().sum()) == 1


def test_what_is_not_written_takes_no_memory() -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    made = zeros((1 << 20, 2048), torch.float32)  # 8 GiB
    made[:1000] = 1
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 1 << 16  # KiB
