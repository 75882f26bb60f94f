import pytest
import torch

pytest.importorskip("triton", reason="these are Triton's kernels")

from tercet.kernels.ops.bitmask import apply_bitmask, pack_bitmask
from tercet.kernels.ops.penalties import Penalties, apply_penalties
from tercet.kernels.triton.bitmask import apply_bitmask_
from tercet.kernels.triton.penalties import apply_penalties_


def test_only_the_rows_named_are_penalised(device: torch.device) -> None:
    logits = torch.randn(4, 2500, device=device)
    counts = torch.randint(0, 3, (2, 2500), dtype=torch.int32, device=device)
    seen = torch.rand(2, 2500, device=device) < 0.3
    strengths = torch.tensor([[1.3, 0.7], [0.5, -0.2], [0.0, 1.1]], device=device)
    penalties = Penalties(repetition=strengths[0], frequency=strengths[1], presence=strengths[2])
    rows = torch.tensor([3, 1], device=device)
    expected = logits.clone()
    expected[rows] = apply_penalties(logits[rows], counts, seen, penalties)
    apply_penalties_(logits, rows, counts, seen, penalties)
    torch.testing.assert_close(logits, expected, rtol=1e-6, atol=1e-6)


def test_the_mask_in_place(device: torch.device) -> None:
    logits = torch.randn(3, 4999, device=device)
    mask = pack_bitmask(torch.rand(3, 4999, device=device) < 0.5)
    expected = apply_bitmask(logits, mask)
    assert apply_bitmask_(logits, mask) is logits
    assert torch.equal(logits, expected)


def test_a_mask_too_short_is_refused(device: torch.device) -> None:
    with pytest.raises(ValueError, match="does not cover"):
        apply_bitmask_(torch.zeros(1, 33, device=device), torch.zeros(1, 1, dtype=torch.int32, device=device))
