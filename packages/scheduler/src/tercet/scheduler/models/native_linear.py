"""Linear layers of modules that are not ours, on native kernels: their weights packed, and float32 between."""

import torch
from torch import nn

from tercet.kernels.memory import give_back
from tercet.kernels.native.library import Library
from tercet.kernels.native.linear import PackedLinear, Quantization, pack_linear


class NativeLinear(nn.Module):
    """Takes the place of a `torch.nn.Linear`. `weight` is empty: there for whoever asks for its dtype."""

    def __init__(self, packed: PackedLinear, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(0, dtype=dtype), requires_grad=False)
        self._packed = packed

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., inputs] -> [..., outputs], of x's dtype."""
        out = self._packed(x.reshape(-1, x.shape[-1]).float())
        return out.view(*x.shape[:-1], -1).to(x.dtype)


def use_native_linears(model: nn.Module, library: Library, quantization: Quantization = "none") -> int:
    """Put native layers in the place of a model's linear ones, and say how many.

    Weights are taken away one by one, so that memory never holds all of them twice; those that others read too stay.
    """
    shared = _shared(model)
    count = 0
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is not nn.Linear:  # a subclass may compute something else
                continue
            bias = None if child.bias is None else child.bias.data
            packed = pack_linear(library, child.weight.data, bias, quantization=quantization)
            setattr(parent, name, NativeLinear(packed, child.weight.dtype))
            if id(child.weight) not in shared:
                child.weight.data = torch.empty(0)
            count += 1
    give_back()  # what the weights took as they were read
    return count


def _shared(model: nn.Module) -> set[int]:
    """The ids of parameters that several modules have, such as an embedding that is the head, too."""
    seen: set[int] = set()
    twice: set[int] = set()
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            (twice if id(parameter) in seen else seen).add(id(parameter))
    return twice
