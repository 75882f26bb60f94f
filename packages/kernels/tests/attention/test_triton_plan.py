"""What a plan sends to a GPU, without one."""

from typing import Any

import pytest
import torch

from tercet.kernels.attention import triton_plan
from tercet.kernels.attention.triton_plan import TritonPlan
from tercet.kernels.tools.check import make_batch


class Tiles:
    """As tensors, but that they only remember where they lie."""

    scarce = False
    """Whether no memory can be pinned."""

    def __init__(self, place: str = "the host's memory") -> None:
        self.place = place

    def pin_memory(self) -> "Tiles":
        if self.scarce:
            raise torch.AcceleratorError("CUDA error: out of memory")
        return Tiles("pinned memory")

    def to(self, device: torch.device, *, non_blocking: bool) -> "Tiles":
        assert non_blocking
        return Tiles(f"{device} from {self.place}")


@pytest.mark.parametrize(
    ("device", "scarce", "place"),
    [
        ("cuda", False, "cuda from pinned memory"),
        ("cuda", True, "cuda from the host's memory"),
        ("cpu", False, "cpu from the host's memory"),
    ],
)
def test_tiles_are_copied_once_from_pinned_memory(
    device: str, scarce: bool, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From other memory the driver may wait for what runs."""
    monkeypatch.setattr(Tiles, "scarce", scarce)
    plan, cut = TritonPlan(), 0

    def cut_tiles(*_: Any) -> Tiles:
        nonlocal cut
        cut += 1
        return Tiles()

    monkeypatch.setattr(triton_plan, "cut_tiles", cut_tiles)
    plan.set_batch(make_batch([(5, 9)], 4, torch.device("cpu")))
    for _ in range(3):  # layers
        tiles: Any = plan.tiles(2, torch.device(device))
        assert tiles.place == place
    assert cut == 1


def test_a_list_of_splits_is_written_anew_where_a_graph_reads_it() -> None:
    """As long as there are as many rows; of other numbers it is another."""
    plan, out = TritonPlan(), torch.zeros(70, 4, 16)
    lengths = [[5000, *range(1, 64)], [3000, *range(64, 127)], [9000, *range(1, 70)]]
    batches = [make_batch([(1, length) for length in row], 16, torch.device("cpu")) for row in lengths]
    lists = []
    for batch in batches:
        plan.set_batch(batch)
        splits = plan.splits(out[: batch.rows], 4)
        assert splits.split_list is not None
        assert torch.equal(splits.split_list, triton_plan.list_splits(batch, 0))
        assert splits.grid == (1, len(splits.split_list))
        lists.append(splits.split_list)
    assert lists[0] is lists[1]
    assert lists[1] is not lists[2]
