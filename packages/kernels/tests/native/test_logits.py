"""Native penalties and log-probabilities are those of the reference, in every instruction set."""

import pytest
import torch

from packages.kernels.tests.pairwise import alternating
from tercet.kernels.native.ops import NativeOps
from tercet.kernels.ops.logprobs import token_logprobs
from tercet.kernels.ops.penalties import Penalties, TokenCounts, apply_penalties_


def logits_of(rows: int, vocab: int, spread: float) -> torch.Tensor:
    generator = torch.Generator().manual_seed(vocab)
    return torch.randn(rows, vocab, generator=generator) * spread


def penalties_of(rows: int) -> Penalties:
    strengths = torch.rand(3, rows, generator=torch.Generator().manual_seed(rows))
    return Penalties(repetition=0.5 + strengths[0], frequency=strengths[1] - 0.5, presence=strengths[2] - 0.5)


def counts_of(sequences: int, vocab: int) -> TokenCounts:
    generator = torch.Generator().manual_seed(vocab)
    output = torch.randint(-6, 4, (sequences, vocab), generator=generator, dtype=torch.int32).clamp(min=0)
    return TokenCounts(output, torch.rand(sequences, vocab, generator=generator) < 0.3)


@pytest.mark.parametrize("vocab", [1, 7, 64, 1025, 12_007])
def test_penalties_are_those_of_the_reference(native: NativeOps, vocab: int) -> None:
    logits, counts = logits_of(6, vocab, 4.0), counts_of(5, vocab)
    logits[:, ::9] = -torch.inf
    rows, sequences, penalties = torch.tensor([5, 0, 3]), torch.tensor([4, 4, 1]), penalties_of(3)
    expected, found = logits.clone(), logits.clone()
    apply_penalties_(expected, rows, counts, sequences, penalties)
    native.apply_penalties_(found, rows, counts, sequences, penalties)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
    assert torch.equal(found[[1, 2, 4]], logits[[1, 2, 4]])


def test_neutral_penalties_change_no_bit(native: NativeOps) -> None:
    logits, counts = logits_of(2, 99, 3.0), counts_of(2, 99)
    rows, found = torch.tensor([0, 1]), logits.clone()
    neutral = Penalties(repetition=torch.ones(2), frequency=torch.zeros(2), presence=torch.zeros(2))
    native.apply_penalties_(found, rows, counts, rows, neutral)
    assert torch.equal(found, logits)


@pytest.mark.parametrize(("vocab", "spread"), alternating([1, 7, 37, 1024, 12_007], [0.0, 0.05, 4.0, 40.0]))
@pytest.mark.parametrize("top", [0, 1, 5, 20])
@pytest.mark.parametrize("given", [None, [3, 0, 3, 2]])
def test_logprobs_are_those_of_the_reference(
    native: NativeOps, vocab: int, spread: float, top: int, given: list[int] | None
) -> None:
    logits = logits_of(4, vocab, spread)
    logits[:, 1::9] = -torch.inf
    logits[:, 3::5] = 0.25
    logits[:, 6::10] = -0.0
    rows = None if given is None else torch.tensor(given)
    tokens = torch.arange(4) % vocab
    chosen, ids, values = native.token_logprobs(logits, tokens, top, rows)
    expected, expected_ids, expected_values = token_logprobs(logits, tokens, top, rows)
    torch.testing.assert_close(chosen, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(values, expected_values, rtol=1e-5, atol=1e-5)
    assert torch.equal(ids, expected_ids)


def test_no_rows_give_empty_results(native: NativeOps) -> None:
    none = torch.zeros(0, dtype=torch.int64)
    chosen, ids, values = native.token_logprobs(torch.zeros(0, 8), none, 3)
    assert (chosen.shape, ids.shape, values.shape) == ((0,), (0, 3), (0, 3))


def test_indices_out_of_range_are_refused(native: NativeOps) -> None:
    logits, one = torch.zeros(2, 8), torch.tensor([0])
    counts, penalties = counts_of(1, 8), penalties_of(1)
    for wrong in (-1, 8):
        with pytest.raises(IndexError, match="a token"):
            native.token_logprobs(logits, torch.tensor([wrong]), 1)
    with pytest.raises(IndexError, match="a row"):
        native.token_logprobs(logits, one, 1, torch.tensor([2]))
    with pytest.raises(ValueError, match="3 tokens"):
        native.token_logprobs(logits, torch.zeros(3, dtype=torch.int64), 1)
    with pytest.raises(IndexError, match="a row"):
        native.apply_penalties_(logits, torch.tensor([2]), counts, one, penalties)
    with pytest.raises(IndexError, match="a sequence"):
        native.apply_penalties_(logits, one, counts, torch.tensor([1]), penalties)
    with pytest.raises(ValueError, match="are not of logits"):
        native.apply_penalties_(torch.zeros(2, 9), one, counts, one, penalties)
