import pytest
import torch

pytest.importorskip("triton", reason="these are Triton's kernels")

from tercet.kernels.triton.embedding import embedding


def test_rows_of_the_table(device: torch.device) -> None:
    weight = torch.randn(9, 1100, device=device)
    ids = torch.tensor([8, 0, 3, 3], device=device)
    assert torch.equal(embedding(ids, weight), weight[ids])


def test_an_unknown_id_reads_no_memory(device: torch.device) -> None:
    out = embedding(torch.tensor([9, -1, 2], device=device), torch.ones(9, 5, device=device))
    assert out.sum(-1).tolist() == [0, 0, 5]
