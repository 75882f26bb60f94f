"""Native versions of the operations of `tercet.kernels.ops.recurrent`: token by token, with the same semantics.

A state's bits depend only on the tokens that made it, not on how they were divided among steps.
"""

import ctypes
from math import gcd

import torch

from tercet.kernels.native import abi
from tercet.kernels.native.library import Library
from tercet.kernels.ops.recurrent import DeltaInputs, GateName, ScanInputs, Segments, SelectiveInputs

_CHANNELS = 64
"""Most channels that a task of the selective scan advances."""
_DTYPES = (torch.float32, torch.bfloat16)


class NativeRecurrence:
    """Recurrent operations of one loaded library."""

    def __init__(self, library: Library) -> None:
        self._call = library.functions

    def gated_delta_rule(self, inputs: DeltaInputs, states: torch.Tensor, segments: Segments) -> torch.Tensor:
        """See `tercet.kernels.ops.recurrent.gated_delta_rule`."""
        form = inputs.q.dtype if inputs.q.dtype in _DTYPES else torch.float32
        q, k, v = (_rows(each.to(form)) for each in inputs[:3])
        decay, beta = _floats(inputs.decay), _floats(inputs.beta)
        out = torch.empty(v.shape)
        pointers = (each.data_ptr() for each in (q, k, v, beta))
        strides = (each.stride(0) for each in (q, k, v))
        tokens = abi.DeltaRows(abi.FORMATS[form], *strides, *pointers)
        recurrence = _recurrence(states, q.shape[1], decay, out)
        self._call.delta_rule(recurrence, tokens, segments.table.data_ptr(), segments.table.shape[0])
        return out

    def state_space_scan(self, inputs: ScanInputs, states: torch.Tensor, segments: Segments) -> torch.Tensor:
        """See `tercet.kernels.ops.recurrent.state_space_scan`."""
        c, b, x, decay = map(_floats, inputs)
        out = torch.empty_like(x)
        recurrence = _recurrence(states, c.shape[1], decay, out)
        pointers = (each.data_ptr() for each in (c, b, x))
        self._call.state_space_scan(recurrence, segments.table.data_ptr(), segments.table.shape[0], *pointers)
        return out

    def gated_rmsnorm(
        self, x: torch.Tensor, weight: torch.Tensor, gate: torch.Tensor, eps: float, act: GateName
    ) -> torch.Tensor:
        """See `tercet.kernels.ops.recurrent.gated_rmsnorm`. The result is rounded once."""
        tokens, heads, size = x.shape
        if gate.shape != (tokens, heads * size) or weight.shape != (size,):
            raise ValueError(f"a gate {list(gate.shape)} and weights {list(weight.shape)} for {list(x.shape)}")
        x, gate = _floats(x), gate if gate.stride(1) == 1 else gate.contiguous()
        out = torch.empty(gate.shape, dtype=gate.dtype)
        pointers = (each.data_ptr() for each in (x, weight, gate))
        form, of_weight = _format(gate), _format(weight)
        sizes = tokens, heads, size, eps, act == "sigmoid"
        self._call.gated_rmsnorm(*pointers, gate.stride(0), out.data_ptr(), *sizes, form, of_weight)
        return out

    def selective_scan(self, inputs: SelectiveInputs, states: torch.Tensor, segments: Segments) -> torch.Tensor:
        """See `tercet.kernels.ops.recurrent.selective_scan`."""
        c, b, x, step, rates = map(_floats, inputs)
        out, rows = torch.empty_like(x), gcd(states.shape[1], _CHANNELS)
        recurrence = _recurrence(states.view(len(states), -1, rows, states.shape[2]), 1, rates, out)
        pointers = (each.data_ptr() for each in (c, b, x, step))
        self._call.selective_scan(recurrence, segments.table.data_ptr(), len(segments.table), *pointers)
        return out


class NativeConvolution:
    """A causal convolution, whose weight [channels, taps] and bias are repacked once."""

    def __init__(self, library: Library, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._call = library.functions.causal_conv
        self._weight = weight.detach().float().T.contiguous()  # [taps, channels]
        self._bias = None if bias is None else bias.detach().float().contiguous()

    def __call__(
        self, x: torch.Tensor, states: torch.Tensor, segments: Segments, *, silu: bool = False
    ) -> torch.Tensor:
        """See `tercet.kernels.ops.recurrent.causal_conv`. The rows of x may be strided."""
        taps, channels = self._weight.shape
        if x.shape[1] != channels or states.shape[1:] != (channels, taps - 1) or not states.is_contiguous():
            raise ValueError(f"inputs {list(x.shape)} and states {list(states.shape)} for {channels} x {taps} weights")
        x = x if x.stride(1) == 1 else x.contiguous()
        out = torch.empty(x.shape, dtype=x.dtype)
        pointers = [None if each is None else each.data_ptr() for each in (self._weight, self._bias, x, states, out)]
        conv = abi.Convolution(channels, taps, _format(x), x.stride(0), _format(states), silu, *pointers)
        self._call(ctypes.byref(conv), segments.table.data_ptr(), segments.table.shape[0])
        return out


def _recurrence(states: torch.Tensor, groups: int, decay: torch.Tensor, out: torch.Tensor) -> abi.Recurrence:
    """Return the struct of an operation, which must not outlive its tensors. Raises ValueError for other states."""
    if states.dtype != torch.float32 or not states.is_contiguous():
        raise ValueError("native kernels advance contiguous states in float32")
    _, heads, rows, columns = states.shape
    decays = 1 if decay.dim() == 2 else rows
    pointers = (each.data_ptr() for each in (decay, states, out))
    return abi.Recurrence(heads, groups, rows, columns, decays, *pointers)


def _floats(x: torch.Tensor) -> torch.Tensor:
    return x.float().contiguous()


def _rows(x: torch.Tensor) -> torch.Tensor:
    """Return x [tokens, heads, size], with contiguous rows of a token."""
    return x if x.stride()[1:] == (x.shape[2], 1) else x.contiguous()


def _format(x: torch.Tensor) -> int:
    if x.dtype not in _DTYPES:
        raise TypeError(f"native kernels take float32 and bfloat16, not {x.dtype}")
    return abi.FORMATS[x.dtype]
