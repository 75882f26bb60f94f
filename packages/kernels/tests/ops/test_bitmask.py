import pytest
import torch

from tercet.kernels.ops.bitmask import apply_bitmask, apply_bitmask_, pack_bitmask


@pytest.mark.parametrize("vocab", [1, 31, 32, 33, 100])
def test_a_packed_mask_allows_what_it_was_made_of(vocab: int) -> None:
    allowed = torch.rand(3, vocab, generator=torch.Generator().manual_seed(vocab)) < 0.5
    logits = torch.randn(3, vocab)
    before, expected = logits.clone(), torch.where(allowed, logits, -torch.inf)
    assert torch.equal(apply_bitmask(logits, pack_bitmask(allowed)), expected)
    assert torch.equal(logits, before)
    assert apply_bitmask_(logits, pack_bitmask(allowed)) is logits
    assert torch.equal(logits, expected)


def test_bit_zero_is_the_lowest_and_the_sign_bit_counts() -> None:
    mask = torch.tensor([[0b101, -(1 << 31)]], dtype=torch.int32)
    finite = apply_bitmask(torch.zeros(1, 64), mask)[0].isfinite()
    assert finite.nonzero()[:, 0].tolist() == [0, 2, 63]
