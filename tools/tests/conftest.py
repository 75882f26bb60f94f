"""Fixtures of the tests of GPU check stages. Without a GPU, Triton's interpreter runs the kernels."""

from collections.abc import Iterator
from typing import Any

import pytest


@pytest.fixture(scope="session", autouse=True)
def _quick_kernels() -> None:
    """Import torch for the tests here only: every process of a run reads this file before it starts others."""
    from packages.kernels.tests.quick_interpreter import quicken

    quicken()


@pytest.fixture(scope="module")
def short_stages() -> Iterator[None]:
    """Make stages measure each operation by one call, and check a few."""
    from tercet.kernels.tools import bench, verification
    from tercet.kernels.tools.triton_checks import CHECKS  # where there is no triton, no test asks for this
    from tools.gpu_stages import executor, kernels, serving
    from tools.tests.tiny import peer

    def once(run: Any, device: Any, budget: float = 0.0) -> float:
        run()
        return 0.5

    with pytest.MonkeyPatch.context() as patch:
        for where in ("tercet.kernels.tools.bench", "tercet.kernels.tools.triton_benchmarks"):
            patch.setattr(f"{where}.HEADS", 2)
            patch.setattr(f"{where}.KV_HEADS", 1)
        patch.setattr(bench, "VOCAB", 64)
        patch.setattr(bench, "measure", once)
        patch.setattr(kernels, "CHECKS", {"triton embedding": CHECKS["triton embedding"]})
        patch.setattr(verification, "_HEAD_DIMS", (8,))
        patch.setattr(verification, "_PAGE_SIZES", (4,))
        patch.setattr(verification, "_ROWS", [(1, 9), (3, 5)])
        patch.setattr(executor, "SETTLING", 2)
        patch.setattr(serving, "continuous_batching", peer)
        yield
