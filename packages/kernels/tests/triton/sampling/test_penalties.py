import pytest
import torch

pytest.importorskip("triton", reason="these are Triton's kernels")

from tercet.kernels.ops import penalties as reference
from tercet.kernels.ops.bitmask import apply_bitmask, pack_bitmask
from tercet.kernels.ops.penalties import Penalties, TokenCounts, apply_penalties
from tercet.kernels.triton.sampling.bitmask import apply_bitmask_
from tercet.kernels.triton.sampling.penalties import apply_penalties_


def test_only_the_rows_named_are_penalised(device: torch.device) -> None:
    """By the counts of their sequences, with strengths that lie in a table of other things."""
    logits = torch.randn(4, 2500, device=device)
    said = torch.randint(0, 3, (3, 2500), dtype=torch.int32, device=device)
    counts = TokenCounts(said, torch.rand(3, 2500, device=device) < 0.3)
    table = torch.tensor([[9.0, 1.3, 0.5, 0.0], [9.0, 0.7, -0.2, 1.1]], device=device)
    repetition, frequency, presence = table[:, 1:].unbind(1)
    penalties = Penalties(repetition=repetition, frequency=frequency, presence=presence)
    rows, sequences = torch.tensor([[3, 1], [0, 2]], device=device)
    expected = logits.clone()
    expected[rows] = apply_penalties(logits[rows], said[sequences], counts.prompt[sequences], penalties)
    plain = logits.clone()
    reference.apply_penalties_(plain, rows, counts, sequences, penalties)
    apply_penalties_(logits, rows, counts, sequences, penalties)
    assert torch.equal(plain, expected)
    torch.testing.assert_close(logits, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab", [4096, 4999, 5000])
def test_the_mask_in_place(dtype: torch.dtype, vocab: int, device: torch.device) -> None:
    """Of bytes that allow all, none and some of their tokens; what lies behind the last token is not touched."""
    whole = torch.randn(3, 5008, device=device).to(dtype)
    logits, before = whole[:, :vocab], whole.clone()
    logits[:, ::7] = torch.nan  # a forbidden token is never said, whatever the model thinks of it
    allowed = torch.rand(3, vocab, device=device) < 0.5
    allowed[0, 100:3000], allowed[1, 100:3000], allowed[2, vocab - 20 :] = False, True, False
    mask = pack_bitmask(allowed)
    expected = apply_bitmask(logits, mask)
    assert apply_bitmask_(logits, mask) is logits
    assert torch.equal(logits.isnan(), expected.isnan())
    assert torch.equal(logits.nan_to_num(9), expected.nan_to_num(9))
    assert torch.equal(whole[:, vocab:], before[:, vocab:])


def test_a_mask_too_short_is_refused(device: torch.device) -> None:
    with pytest.raises(ValueError, match="does not cover"):
        apply_bitmask_(torch.zeros(1, 33, device=device), torch.zeros(1, 1, dtype=torch.int32, device=device))
