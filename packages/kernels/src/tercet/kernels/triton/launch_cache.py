"""`launch`: a kernel that was launched before is launched again without asking Triton what it would compile."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from triton import knobs
from triton.compiler import CompiledKernel
from triton.runtime import JITFunction, driver


class _Known(NamedTuple):
    """A kernel that was compiled, what it was compiled of, and the constants of a launch, which are passed by."""

    kernel: JITFunction[Any]
    compiled: CompiledKernel
    constants: list[Any]


_MOST_KNOWN = 1 << 13
_known: dict[tuple[Any, ...], _Known] = {}


def launch(
    kernel: Any,
    grid: tuple[int, ...],
    tensors: Sequence[torch.Tensor | None],
    numbers: Sequence[float],
    /,
    **constants: Any,
) -> None:
    """As `kernel[grid](*tensors, *numbers, **constants)`, but what was launched before takes half of the time.

    Triton compiles a kernel for constants and types, for which whole numbers are 1 or multiples of 16, and for which
    tensors begin at multiples of 16 bytes. Where constants and whole numbers are the same, and tensors of the same
    types begin as far from such multiples, Triton is not asked again. What else it looks at is taken for settled: its
    options, and the globals that kernels read. Where anybody hooks launches, they are Triton's.
    """
    if not isinstance(kernel, JITFunction):  # it is interpreted
        kernel[grid](*tensors, *numbers, **constants)
        return
    device = driver.active.get_current_device()
    addresses: list[int | None] = []
    kinds: list[tuple[torch.dtype, int, bool] | None] = []
    for tensor in tensors:
        address = None if tensor is None else tensor.data_ptr()
        addresses.append(address)
        kinds.append(None if tensor is None or address is None else (tensor.dtype, address % 16, tensor.is_cuda))
    types = (*map(type, numbers),)  # 1 equals 1.0
    values = (*(None if kind is float else number for kind, number in zip(types, numbers, strict=True)),)
    key = (id(kernel), device, (*constants,), (*constants.values(),), values, types, (*kinds,))
    known = _known.get(key)
    if known is None or _is_hooked(knobs.runtime.launch_enter_hook) or _is_hooked(knobs.runtime.launch_exit_hook):
        _remember(key, kernel, kernel[grid](*tensors, *numbers, **constants), len(tensors) + len(numbers), constants)
        return
    _, compiled, passed_by = known
    x, y, z = (*grid, 1, 1)[:3]
    stream = driver.active.get_current_stream(device)
    settled = compiled.function, compiled.packed_metadata, None, None, None  # no hooks, and nothing for them
    compiled.run(x, y, z, stream, *settled, *addresses, *numbers, *passed_by)


def _is_hooked(hook: Any) -> bool:
    """Of a chain of hooks, or of what somebody has put in its place."""
    return bool(getattr(hook, "calls", hook))


def _remember(
    key: tuple[Any, ...], kernel: JITFunction[Any], compiled: Any, given: int, constants: dict[str, Any]
) -> None:
    """What Triton launched, unless it was kept from that; only a GPU of NVIDIA's is known to compile by no more."""
    rest = kernel.params[given:]
    if not all(param.is_constexpr for param in rest):
        raise ValueError(f"{kernel.__name__} is launched with numbers that are given by name")
    if isinstance(compiled, CompiledKernel) and compiled.metadata.target.backend == "cuda":
        if len(_known) >= _MOST_KNOWN:  # numbers of rows differ from prompt to prompt
            _known.clear()
        _known[key] = _Known(kernel, compiled, [constants.get(param.name) for param in rest])
