import pytest
import torch

from tercet.kernels.tools import triton_checks
from tercet.kernels.triton.linear import quantized

pytest.importorskip("triton", reason="these are Triton's kernels")

from tercet.kernels.attention import triton_plan
from tercet.kernels.attention.api import AttentionBatch
from tercet.kernels.tools.check import verdict
from tercet.kernels.tools.triton_checks import CHECKS


@pytest.mark.parametrize("name", CHECKS)
def test_a_check_passes(name: str, device: torch.device) -> None:
    assert verdict(lambda: CHECKS[name](device)) == ""


def test_a_check_finds_a_wrong_operation(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_checks, "apply_bitmask_", lambda logits, _: logits)
    assert verdict(lambda: CHECKS["triton penalties, mask"](device)).startswith("AssertionError")


def test_check_covers_split_k(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantized, "add_splits", lambda parts, bias, out: out.zero_())  # noqa: ARG005
    assert verdict(lambda: CHECKS["triton quantised"](device)).startswith("AssertionError")


@pytest.mark.slow
def test_check_covers_split_lists(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that stays as it was for the first step is found."""
    monkeypatch.setattr(triton_plan.TritonPlan, "set_batch", _keep_lists)
    assert verdict(lambda: CHECKS["triton many decodes"](device)).startswith("AssertionError")


def _keep_lists(plan: triton_plan.TritonPlan, batch: AttentionBatch) -> None:
    plan._batch = batch
