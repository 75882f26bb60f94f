"""A mixture of experts on packed weights: see csrc/mixture.h, and `tercet.kernels.ops.moe` for what it computes."""

import ctypes
from collections.abc import Sequence

import torch

from tercet.kernels.native import abi
from tercet.kernels.native.linear import PackedLinear, PackedMLP, check_shape
from tercet.kernels.ops.activation import Gate


class Mixture:
    """Routes tokens to experts, and adds up what these give. The struct points into the weights, which this keeps.

    Of experts that are equally likely to a token the first ones are taken.
    """

    def __init__(
        self,
        router: PackedLinear,
        experts: Sequence[PackedMLP],
        *,
        top_k: int,
        renormalise: bool,
        gate: Gate = "silu",
        shared: tuple[PackedLinear, PackedMLP] | None = None,
    ) -> None:
        """`shared` is an expert that every token has, and what it is weighed by the sigmoid of.

        Raises ValueError for weights that do not fit together.
        """
        self.router = router
        self._weights = every = [*experts, *([] if shared is None else [shared[1]])]
        self._shared_gate = None if shared is None else shared[0]
        _check(router, every, count=len(experts), top_k=top_k)
        if self._shared_gate is not None:
            check_shape(self._shared_gate, 1, int(router.struct.k))
            if self._shared_gate.struct.format != router.struct.format:
                raise ValueError("the gate of the shared expert and the router are of one format")
        each = [expert.gate_up for expert in every], [expert.down for expert in every]
        self._arrays = [(abi.Linear * len(every))(*(linear.struct for linear in linears)) for linears in each]
        self.struct = abi.Mixture(
            *(len(experts), top_k, renormalise, abi.GATES[gate]),
            *(router.struct, abi.Linear() if self._shared_gate is None else self._shared_gate.struct),
            *(ctypes.cast(array, ctypes.c_void_p) for array in self._arrays),
        )

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """X float32 [tokens, hidden] -> float32 [tokens, hidden]."""
        if x.dtype != torch.float32 or x.device.type != "cpu" or x.ndim != 2 or x.shape[1] != self.router.struct.k:
            raise ValueError(
                f"expected float32 [tokens, {self.router.struct.k}] on the CPU, not {x.dtype} {list(x.shape)}"
            )
        x = x.contiguous()
        out = torch.empty_like(x)
        functions = self.router.library.functions
        functions.mixture(ctypes.byref(self.struct), x.data_ptr(), len(x), out.data_ptr())
        return out


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
