"""Fixtures of the tests of GPU check stages. Without a GPU, Triton's interpreter runs the kernels."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from packages.kernels.tests.quick_interpreter import quicken

quicken()


@pytest.fixture(scope="module")
def short_stages() -> Iterator[None]:
    """Make stages measure each operation by one call, and check a few."""
    from tercet.kernels.tools.triton_checks import CHECKS  # where there is no triton, no test asks for this
    from tools.tests.tiny import peer

    def once(run: Any, device: torch.device, budget: float = 0.0) -> float:
        run()
        return 0.5

    with pytest.MonkeyPatch.context() as patch:
        for where in ("tercet.kernels.tools.bench", "tercet.kernels.tools.triton_benchmarks"):
            patch.setattr(f"{where}.HEADS", 2)
            patch.setattr(f"{where}.KV_HEADS", 1)
        patch.setattr("tercet.kernels.tools.bench.VOCAB", 64)
        patch.setattr("tercet.kernels.tools.bench.measure", once)
        patch.setattr("tools.gpu_stages.kernels.CHECKS", {"triton embedding": CHECKS["triton embedding"]})
        patch.setattr("tercet.kernels.tools.verification._HEAD_DIMS", (8,))
        patch.setattr("tercet.kernels.tools.verification._PAGE_SIZES", (4,))
        patch.setattr("tercet.kernels.tools.verification._ROWS", [(1, 9), (3, 5)])
        patch.setattr("tools.gpu_stages.executor.SETTLING", 2)
        patch.setattr("tools.gpu_stages.serving.continuous_batching", peer)
        yield
