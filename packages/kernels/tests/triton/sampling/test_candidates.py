import pytest
import torch

pytest.importorskip("triton", reason="these are Triton's kernels")

from tercet.kernels.triton.launch import pdl_options
from tercet.kernels.triton.sampling.candidates import collect_kernel, cut_kernel

VOCAB, BLOCK, CAPACITY = 20_000, 2048, 2048
WANTED = CAPACITY * 5 // 8


def collected(logits: torch.Tensor, top_k: list[int]) -> tuple[torch.Tensor, list[dict[int, float]]]:
    """The cuts of rows, and the candidates of each with their logits; empty for a row with too many."""
    rows, blocks, device = len(logits), -(-VOCAB // BLOCK), logits.device
    cuts, counts = torch.empty(rows, device=device), torch.empty(rows, dtype=torch.int32, device=device)
    tokens = torch.empty(rows, CAPACITY, dtype=torch.int32, device=device)
    values, one = torch.empty(rows, CAPACITY, device=device), torch.ones(rows, device=device)
    bests, sums = torch.empty(2, rows, blocks, device=device).unbind()
    pdl, wide = pdl_options(device), (VOCAB, logits.stride(0))
    given = logits, torch.tensor(top_k, device=device), cuts, counts
    cut_kernel[(rows,)](*given, *wide, CAPACITY=CAPACITY, **pdl)
    lists = cuts, counts, tokens, values, bests, sums
    collect_kernel[(rows, blocks)](logits, one, *lists, *wide, blocks, CAPACITY=CAPACITY, BLOCK=BLOCK, **pdl)
    assert torch.equal(bests.amax(1), logits.float().amax(1))
    total = (sums * bests.exp()).sum(1)
    torch.testing.assert_close(total, logits.float().exp().sum(1), rtol=1e-4, atol=0)
    found = []
    for row, count in enumerate(counts.tolist()):
        size = count if count <= CAPACITY else 0
        found.append(dict(zip(tokens[row, :size].tolist(), values[row, :size].tolist(), strict=True)))
        assert len(found[-1]) == size
    return cuts, found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_lists_hold_every_token_from_the_cut_on(dtype: torch.dtype, device: torch.device) -> None:
    """As many as are wanted, within what a sample of a fifth of the row can tell."""
    logits = (torch.randn(4, VOCAB, device=device) * 3).to(dtype)
    cuts, lists = collected(logits, [0, 20, 200, 10_000])
    for row, (cut, listed) in enumerate(zip(cuts.tolist(), lists, strict=True)):
        expected = (logits[row].float() >= cut).nonzero()[:, 0].tolist()
        assert sorted(listed) == expected
        assert [listed[token] for token in expected] == logits[row, expected].float().tolist()
    for wanted, listed in zip((WANTED, 296, 656, WANTED), lists, strict=True):
        assert wanted * 0.7 < len(listed) < wanted * 1.4


def test_rows_of_few_finite_logits_list_them_all(device: torch.device) -> None:
    logits = torch.full((2, VOCAB), float("-inf"), device=device)
    logits[0, [3, 12_000]] = 1.0
    logits[1, 5000:5400] = torch.randn(400, device=device)
    cuts, (few, more) = collected(logits, [0, 0])
    assert few == {3: 1.0, 12_000: 1.0}
    assert sorted(more) == [*range(5000, 5400)]
    assert cuts.tolist() == [float("-inf")] * 2


def test_equal_logits_do_not_fit(device: torch.device) -> None:
    cuts, lists = collected(torch.zeros(1, VOCAB, device=device), [20])
    assert cuts.tolist() == [0.0]
    assert lists == [{}]
