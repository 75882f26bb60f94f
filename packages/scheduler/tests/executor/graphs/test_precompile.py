"""Steps that are recorded so that their kernels are compiled by several processes."""

import logging
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="the kernels are compiled by triton")

from tercet.kernels.triton import precompile as precompiling
from tercet.scheduler.executor.graphs.precompile import precompile
from tercet.scheduler.executor.graphs.warmup import worst_plan

PLANS = [worst_plan(1, 1, 10), worst_plan(2, 4, 10)]


class Kernel:
    name = "a_kernel"


class Steps:
    """A runner whose steps need some kernels, and the compiler of these."""

    def __init__(self, patch: pytest.MonkeyPatch, kernels: int, failures: list[str] | None = None) -> None:
        self.kernels = [Kernel() for _ in range(kernels)]
        self.failures = failures or []
        self.executed = 0
        self.compiled: list[tuple[int, int]] = []
        patch.setattr(precompiling, "missing", lambda _: self.kernels)
        patch.setattr(precompiling, "compile_all", self.compile_all)

    def execute(self, plan: Any) -> Any:
        assert not torch.empty(100).any(), "what no kernel fills is zero"
        self.executed += 1
        return self

    def result(self) -> None:
        pass

    def compile_all(self, kernels: list[Any], workers: int, report: Any) -> list[str]:
        self.compiled.append((len(kernels), workers))
        report(1, len(kernels))
        return self.failures


@pytest.mark.parametrize(
    ("kernels", "cores", "expected"),
    [(40, 3, [(40, 3)]), (40, 100, [(40, 8)]), (5, 100, [(5, 5)]), (9, 0, [(9, 1)]), (3, 4, []), (0, 4, [])],
)
def test_workers_are_bounded(kernels: int, cores: int, expected: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    steps = Steps(monkeypatch, kernels)
    precompile(lambda: steps, PLANS, cores)  # type: ignore[arg-type, return-value]
    assert steps.executed == 2
    assert steps.compiled == expected


def test_the_log_says_what_is_compiled_and_what_is_not(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    steps = Steps(monkeypatch, 12, ["scan_kernel: RuntimeError: out of registers"])
    with caplog.at_level(logging.INFO):
        precompile(lambda: steps, PLANS, 4)  # type: ignore[arg-type, return-value]
    first, warning, last = [record.getMessage() for record in caplog.records]
    assert first == "compiling kernels: kernels=12 workers=4"
    assert "scan_kernel: RuntimeError: out of registers" in warning
    assert last.startswith("compiled kernels: kernels=12 failed=1 seconds=")


def test_steps_that_cannot_be_recorded_leave_kernels_to_their_launches(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    steps = Steps(monkeypatch, 12)
    monkeypatch.setattr(steps, "result", lambda: torch.zeros(1)[3])
    precompile(lambda: steps, PLANS, 4)  # type: ignore[arg-type, return-value]
    assert steps.compiled == []
    assert "each is compiled by its first launch" in caplog.text
    assert not torch.empty(0).any()


def test_a_device_that_has_failed_ends_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = Steps(monkeypatch, 12)

    def fail() -> None:
        raise torch.AcceleratorError("an illegal memory access")

    monkeypatch.setattr(steps, "result", fail)
    with pytest.raises(torch.AcceleratorError):
        precompile(lambda: steps, PLANS, 4)  # type: ignore[arg-type, return-value]
