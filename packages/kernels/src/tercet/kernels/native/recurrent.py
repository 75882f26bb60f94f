"""Native versions of the operations of `tercet.kernels.ops.recurrent`: token by token, with the same semantics.

A state's bits depend only on the tokens that made it, not on how they were divided among steps.
"""

from math import gcd

import torch

from tercet.kernels.native import abi
from tercet.kernels.native.library import Library
from tercet.kernels.ops.recurrent import DeltaInputs, ScanInputs, Segments, SelectiveInputs, l2norm

_CHANNELS = 64
"""Most channels that a task of the selective scan advances."""


class NativeRecurrence:
    """Recurrent operations of one loaded library."""

    def __init__(self, library: Library) -> None:
        self._call = library.functions

    def gated_delta_rule(self, inputs: DeltaInputs, states: torch.Tensor, segments: Segments) -> torch.Tensor:
        """See `tercet.kernels.ops.recurrent.gated_delta_rule`."""
        q, k = (l2norm(each.float()) for each in inputs[:2])
        q, v, factor, beta = (
            q * q.shape[2] ** -0.5,
            _floats(inputs.v),
            _floats(inputs.decay).exp(),
            _floats(inputs.beta),
        )
        out = torch.empty_like(v)
        recurrence = _recurrence(states, q.shape[1], factor, out)
        pointers = (each.data_ptr() for each in (q, k, v, beta))
        self._call.delta_rule(recurrence, segments.table.data_ptr(), len(segments.table), *pointers)
        return out

    def state_space_scan(self, inputs: ScanInputs, states: torch.Tensor, segments: Segments) -> torch.Tensor:
        """See `tercet.kernels.ops.recurrent.state_space_scan`."""
        c, b, x, factor = *map(_floats, inputs[:3]), _floats(inputs.decay).exp()
        out = torch.empty_like(x)
        recurrence = _recurrence(states, c.shape[1], factor, out)
        pointers = (each.data_ptr() for each in (c, b, x))
        self._call.state_space_scan(recurrence, segments.table.data_ptr(), len(segments.table), *pointers)
        return out

    def selective_scan(self, inputs: SelectiveInputs, states: torch.Tensor, segments: Segments) -> torch.Tensor:
        """See `tercet.kernels.ops.recurrent.selective_scan`."""
        c, b, x, step, rates = map(_floats, inputs)
        out, rows = torch.empty_like(x), gcd(states.shape[1], _CHANNELS)
        recurrence = _recurrence(states.view(len(states), -1, rows, states.shape[2]), 1, rates, out)
        pointers = (each.data_ptr() for each in (c, b, x, step))
        self._call.selective_scan(recurrence, segments.table.data_ptr(), len(segments.table), *pointers)
        return out


def _recurrence(states: torch.Tensor, groups: int, factor: torch.Tensor, out: torch.Tensor) -> abi.Recurrence:
    """Return the struct of an operation, which must not outlive its tensors. Raises ValueError for other states."""
    if states.dtype != torch.float32 or not states.is_contiguous():
        raise ValueError("native kernels advance contiguous states in float32")
    _, heads, rows, columns = states.shape
    factors = 1 if factor.dim() == 2 else rows
    pointers = (each.data_ptr() for each in (factor, states, out))
    return abi.Recurrence(heads, groups, rows, columns, factors, *pointers)


def _floats(x: torch.Tensor) -> torch.Tensor:
    return x.float().contiguous()
