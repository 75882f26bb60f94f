"""Mixture of experts on packed weights: see csrc/mixture.h, and `tercet.kernels.ops.moe` for the definition."""

import ctypes
from collections.abc import Sequence

import torch

from tercet.kernels.native import abi
from tercet.kernels.native.linear import PackedLinear, PackedMLP, check_shape
from tercet.kernels.ops.activation import Gate
from tercet.kernels.ops.moe import Routing


class Mixture:
    """Router and experts of a layer. The struct points into the weights, which this object owns.

    Of experts with equal scores the first are chosen.
    """

    def __init__(
        self,
        router: PackedLinear,
        experts: Sequence[PackedMLP],
        routing: Routing,
        *,
        correction: torch.Tensor | None = None,
        gate: Gate = "silu",
        shared: tuple[PackedLinear | None, PackedMLP] | None = None,
    ) -> None:
        """Take the weights; `shared` is an expert that every token uses, with the weight of its sigmoid gate or None.

        `correction` is that of `route`. Raises ValueError for weights that do not fit together.
        """
        self.router = router
        self._weights = every = [*experts, *([] if shared is None else [shared[1]])]
        self._shared_gate = None if shared is None else shared[0]
        _check(router, every, count=len(experts), top_k=routing.top_k)
        self._correction = _checked_correction(correction, len(experts))
        if self._shared_gate is not None:
            check_shape(self._shared_gate, 1, int(router.struct.k))
            if self._shared_gate.struct.format != router.struct.format:
                raise ValueError("the gate of the shared expert and the router are of one format")
        each = [expert.gate_up for expert in every], [expert.down for expert in every]
        self._arrays = [(abi.Linear * len(every))(*(linear.struct for linear in linears)) for linears in each]
        self.struct = abi.Mixture(
            *(len(experts), abi.GATES[gate], shared is not None, _choice(routing, self._correction)),
            *(router.struct, abi.Linear() if self._shared_gate is None else self._shared_gate.struct),
            *(ctypes.cast(array, ctypes.c_void_p) for array in self._arrays),
        )

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Apply the mixture to X float32 [tokens, hidden]; returns float32 [tokens, hidden]."""
        if x.dtype != torch.float32 or x.device.type != "cpu" or x.ndim != 2 or x.shape[1] != self.router.struct.k:
            raise ValueError(
                f"expected float32 [tokens, {self.router.struct.k}] on the CPU, not {x.dtype} {list(x.shape)}"
            )
        x = x.contiguous()
        out = torch.empty_like(x)
        functions = self.router.library.functions
        functions.mixture(ctypes.byref(self.struct), x.data_ptr(), len(x), out.data_ptr())
        return out


def _choice(routing: Routing, correction: torch.Tensor | None) -> abi.Choice:
    groups = routing.groups, routing.top_groups, routing.group_best
    return abi.Choice(
        *(routing.top_k, routing.score == "sigmoid", routing.renormalize, *groups, routing.scale),
        None if correction is None else correction.data_ptr(),
    )


def _checked_correction(correction: torch.Tensor | None, count: int) -> torch.Tensor | None:
    if correction is None:
        return None
    if correction.shape != (count,):
        raise ValueError(f"a correction {list(correction.shape)} of {count} experts")
    return correction.detach().float().contiguous()


def _check(router: PackedLinear, experts: Sequence[PackedMLP], *, count: int, top_k: int) -> None:
    hidden = int(router.struct.k)
    check_shape(router, count, hidden)
    if not 1 <= top_k <= count:
        raise ValueError(f"{top_k} of {count} experts")
    for gate_up, down in experts:
        inner = int(down.struct.k)
        check_shape(gate_up, 2 * inner, hidden)
        check_shape(down, hidden, inner)
        if {gate_up.struct.format, down.struct.format} != {experts[0].down.struct.format}:
            raise ValueError("the weights of experts are of one format")
