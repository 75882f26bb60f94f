import pytest
import torch

pytest.importorskip("triton", reason="these are Triton's kernels")

from tercet.kernels.triton.embedding import TILINGS, embedding
from tercet.kernels.triton.launch import Tiling

every_tiling = pytest.mark.parametrize("tiling", TILINGS, ids=str)


@every_tiling
@pytest.mark.parametrize("size", [40, 1100, 9000])
def test_rows_of_the_table(size: int, tiling: Tiling, device: torch.device) -> None:
    """One block of many tokens, and many blocks of one token."""
    weight = torch.randn(9, size, device=device)
    ids = torch.tensor([8, 0, 3, 3, 7], device=device)
    assert torch.equal(embedding(ids, weight, tiling=tiling), weight[ids])


@every_tiling
def test_an_unknown_id_reads_no_memory(tiling: Tiling, device: torch.device) -> None:
    out = embedding(torch.tensor([9, -1, 2], device=device), torch.ones(9, 5, device=device), tiling=tiling)
    assert out.sum(-1).tolist() == [0, 0, 5]


def test_tokens_that_are_not_there_are_not_written(device: torch.device) -> None:
    """Of a program's eight tokens there are three."""
    memory = torch.full((8, 128), -1.0, device=device)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "empty", lambda *_, **__: memory[:3])
        embedding(torch.arange(3, device=device), torch.ones(9, 128, device=device), tiling=Tiling(1024, 4))
    assert memory.mean(1).tolist() == [1, 1, 1, -1, -1, -1, -1, -1]
