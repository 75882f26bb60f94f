import pytest
import torch

pytest.importorskip("triton", reason="these are Triton's kernels")

from tercet.kernels.ops import logprobs as logprobs_reference
from tercet.kernels.ops import sampling as reference
from tercet.kernels.triton.largest import largest, top_candidates
from tercet.kernels.triton.logprobs import token_logprobs

INF, NAN = float("inf"), float("nan")


def rows(device: torch.device, vocab: int = 9001) -> torch.Tensor:
    """Random logits, ties across blocks, infinities and a NaN."""
    logits = torch.randn(6, vocab, device=device).mul(8).round().div(4)
    logits[1] = -INF
    logits[2, [5, 4100, 8200]] = 100.0
    logits[3, [7, 9000]] = torch.tensor([-NAN, INF], device=device)
    logits[4] = torch.where(logits[4] > 0, -0.0, logits[4])
    logits[4, 4500] = 0.0
    logits[5, 8999] = INF
    return logits


def test_largest_is_the_reference(device: torch.device) -> None:
    logits = rows(device)
    values, tokens = largest(logits)
    expected, ids = reference.largest(logits)
    assert torch.equal(tokens, ids)
    torch.testing.assert_close(values, expected, rtol=0, atol=0, equal_nan=True)
    assert tokens[2:4].tolist() == [5, 7]


def test_candidates_in_order(device: torch.device) -> None:
    logits = rows(device)[[0, 2, 5]]
    for width in (1, 7):
        values, ids = top_candidates(logits, width)
        expected, expected_ids = reference.top_candidates(logits, width)
        assert torch.equal(ids, expected_ids)
        assert torch.equal(values, expected)


def test_all_of_a_small_vocabulary(device: torch.device) -> None:
    logits = torch.randn(2, 5, device=device)
    assert torch.equal(top_candidates(logits, 20)[1], reference.top_candidates(logits, 20)[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("top", [0, 3])
@pytest.mark.parametrize("some", [None, [2, 0]])
def test_logprobs(dtype: torch.dtype, top: int, some: list[int] | None, device: torch.device) -> None:
    logits = torch.randn(3, 9001, device=device).mul(3).to(dtype)
    logits[1, 1:] = -INF
    tokens = torch.tensor([3, 0, 9000], device=device)[: 2 if some else 3]
    given = None if some is None else torch.tensor(some, device=device)
    actual = token_logprobs(logits, tokens, top, given)
    expected = logprobs_reference.token_logprobs(logits, tokens, top, given)
    torch.testing.assert_close(actual[0], expected[0], rtol=1e-5, atol=1e-5)
    assert torch.equal(actual[1], expected[1])
    torch.testing.assert_close(actual[2], expected[2], rtol=1e-5, atol=1e-5)
