import math

import pytest
import torch

from tercet.kernels.ops import logprobs as logprobs_module
from tercet.kernels.ops import sampling
from tercet.kernels.ops.logprobs import token_logprobs
from tercet.kernels.ops.sampling import top_candidates


def test_logprobs_are_those_of_the_softmax() -> None:
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(2)) * 4
    chosen, ids, values = token_logprobs(logits, torch.tensor([7, 0, 49]), 5)
    for row, token in enumerate([7, 0, 49]):
        weights = [math.exp(value) for value in logits[row].tolist()]
        logprobs = [math.log(weight / sum(weights)) for weight in weights]
        best = sorted(range(50), key=lambda i: (-logprobs[i], i))[:5]
        assert ids[row].tolist() == best
        torch.testing.assert_close(values[row], torch.tensor([logprobs[i] for i in best]), rtol=1e-5, atol=1e-5)
        assert math.isclose(float(chosen[row]), logprobs[token], rel_tol=1e-5)


def test_without_alternatives_only_the_chosen_is_reported() -> None:
    chosen, ids, values = token_logprobs(torch.zeros(2, 8), torch.tensor([1, 2]), 0)
    torch.testing.assert_close(chosen, torch.full((2,), -math.log(8)))
    assert ids.shape == values.shape == (2, 0)


def test_rows_are_scored_independently() -> None:
    logits = torch.randn(4, 9, generator=torch.Generator().manual_seed(3))
    rows, tokens = torch.tensor([3, 1]), torch.tensor([0, 8])
    for actual, expected in zip(
        token_logprobs(logits, tokens, 2, rows), token_logprobs(logits[rows], tokens, 2), strict=True
    ):
        assert torch.equal(actual, expected)


@pytest.mark.parametrize("top", [0, 3])
@pytest.mark.parametrize("given", [None, [3, 1, 8, 0, 8, 2, 5]])
def test_temporaries_are_those_of_a_block(top: int, given: list[int] | None, monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.randn(9, 50, generator=torch.Generator().manual_seed(4)) * 4
    rows = None if given is None else torch.tensor(given)
    tokens = torch.arange(9 if given is None else len(given)) * 5
    whole = token_logprobs(logits, tokens, top, rows)
    sizes = []

    def watched(block: torch.Tensor, width: int) -> tuple[torch.Tensor, torch.Tensor]:
        sizes.append(block.numel())
        return top_candidates(block, width)

    monkeypatch.setattr(sampling, "_BLOCK", 149)  # two rows
    monkeypatch.setattr(logprobs_module, "top_candidates", watched)
    for actual, expected in zip(token_logprobs(logits, tokens, top, rows), whole, strict=True):
        assert torch.equal(actual, expected)
    last = [50] if len(tokens) % 2 else []
    assert sizes == ([100] * (len(tokens) // 2) + last if top else [])


def test_no_rows_give_empty_results() -> None:
    chosen, ids, values = token_logprobs(torch.zeros(0, 8), torch.zeros(0, dtype=torch.int64), 3)
    assert (chosen.shape, ids.shape, values.shape) == ((0,), (0, 3), (0, 3))
