"""A layer's parameters and modules, as they are found once it has something to compute with."""

import pytest
import torch
from torch import nn

from tercet.scheduler.models.layers.layer_ops import TORCH, OpsModule, set_ops
from tercet.scheduler.models.layers.norms import RMSNorm


class Pair(OpsModule):
    def __init__(self) -> None:
        super().__init__()
        self.norm = RMSNorm(4, 1e-5, torch.float32)


def test_what_is_set_again_is_what_is_found() -> None:
    """Loading other weights sets parameters, and native kernels take the place of modules."""
    pair = Pair()
    set_ops(pair, TORCH)
    assert vars(pair)["norm"] is pair.norm
    pair.norm.weight = nn.Parameter(torch.full((4,), 3.0), requires_grad=False)
    assert pair.norm(torch.ones(1, 4)).tolist() == [pytest.approx([3.0] * 4, rel=1e-4)]
    pair.norm = other = RMSNorm(4, 1e-5, torch.float32)
    assert pair.norm is other
    assert dict(pair.named_parameters()).keys() == {"norm.weight"}
    assert next(pair.parameters()) is other.weight
