import pytest
import torch

from tercet.kernels.triton.sampling import argmax

pytest.importorskip("triton", reason="these are Triton's kernels")

from tercet.kernels.ops import logprobs as logprobs_reference
from tercet.kernels.ops import sampling as reference
from tercet.kernels.triton.launch import Tiling
from tercet.kernels.triton.sampling.argmax import TILINGS, argmax_with_values, best_of_blocks, greedy, top_candidates
from tercet.kernels.triton.sampling.logprobs import TILINGS as LOGPROBS_TILINGS
from tercet.kernels.triton.sampling.logprobs import token_logprobs

INF, NAN = float("inf"), float("nan")


def rows(device: torch.device, vocab: int = 9001) -> torch.Tensor:
    """Random logits, ties within lanes and across blocks, infinities and NaN."""
    logits = torch.randn(8, vocab, device=device).mul(8).round().div(4)
    logits[1] = -INF
    logits[2, [5, 517, 4101, 8197]] = 100.0
    logits[3, [7, 9000]] = torch.tensor([-NAN, INF], device=device)
    logits[4] = torch.where(logits[4] > 0, -0.0, logits[4])
    logits[4, 4500] = 0.0
    logits[5, 8999] = INF
    logits[6] = NAN
    logits[7, [4100, 8197]] = INF
    logits[7, [4100 + 512, 4100 + 2048]] = NAN
    return logits


@pytest.mark.parametrize("tiling", TILINGS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_argmax_equals_the_reference(dtype: torch.dtype, tiling: Tiling, device: torch.device) -> None:
    logits = rows(device, max(9001, tiling.block + 700)).to(dtype)
    values, tokens = argmax_with_values(logits, tiling=tiling)
    expected, ids = reference.argmax_with_values(logits)
    assert torch.equal(tokens, ids)
    torch.testing.assert_close(values, expected, rtol=0, atol=0, equal_nan=True)
    assert tokens[[1, 2, 3, 6, 7]].tolist() == [0, 5, 7, 0, 4612]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_greedy_gives_no_token_if_the_largest_logit_is_not_finite(dtype: torch.dtype, device: torch.device) -> None:
    logits = rows(device).to(dtype)
    tokens = greedy(logits)
    assert torch.equal(tokens, reference.greedy(logits))
    assert (tokens == -1).any()
    assert (tokens > 0).any()


@pytest.mark.parametrize("vocab", [1, 7, 513])
def test_argmax_ignores_columns_beyond_the_vocabulary(vocab: int, device: torch.device) -> None:
    rows = torch.randn(3, vocab + 3, device=device)
    rows[1] = -INF
    rows[2, vocab // 512] = 50.0
    rows[:, vocab:] = 100.0
    logits = rows[:, :vocab]
    assert torch.equal(argmax_with_values(logits)[1], reference.argmax(logits))


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


@pytest.mark.parametrize("tiling", LOGPROBS_TILINGS, ids=str)
def test_logprobs_do_not_depend_on_the_tiling(tiling: Tiling, device: torch.device) -> None:
    logits = torch.randn(3, max(9001, tiling.block + 700), device=device).mul(3)
    logits[1, 1:] = -INF
    tokens = torch.tensor([3, 0, 9000], device=device)
    actual = token_logprobs(logits, tokens, 0, tiling=tiling)[0]
    torch.testing.assert_close(actual, logprobs_reference.token_logprobs(logits, tokens, 0)[0], rtol=1e-5, atol=1e-5)


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


def test_few_kernels_are_compiled_for_whatever_numbers_of_candidates(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = set()

    def noted(logits: torch.Tensor, count: int, some: torch.Tensor | None = None) -> torch.Tensor:
        counts.add(count)
        return best_of_blocks(logits, count, some)

    monkeypatch.setattr(argmax, "best_of_blocks", noted)
    logits = torch.randn(2, 300, device=device)
    for width in range(1, 40):
        assert torch.equal(top_candidates(logits, width)[1], reference.top_candidates(logits, width)[1])
    assert counts == {5, 20, 32, 64}
