"""Cache of compiled kernels, which makes repeated launches skip Triton's own dispatch."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from triton import knobs
from triton.compiler import CompiledKernel
from triton.runtime import JITFunction, driver


class _Known(NamedTuple):
    """Compiled kernel, its source (kept alive for its id), and the values of its constexpr parameters."""

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
    """Launch `kernel[grid](*tensors, *numbers, **constants)`; repeated launches take half of the time.

    Triton specializes a kernel by constants, by types, by integers that are 1 or multiples of 16, and by tensors whose
    addresses are multiples of 16 bytes. If constants and integers are equal, and tensors have the same types and
    addresses modulo 16, the compiled kernel is reused. Triton's options and the globals that kernels read are assumed
    not to change. While launch hooks are installed, Triton launches itself.
    """
    if not isinstance(kernel, JITFunction):  # interpreted
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
    settled = compiled.function, compiled.packed_metadata, None, None, None  # no hooks, and no metadata for them
    compiled.run(x, y, z, stream, *settled, *addresses, *numbers, *passed_by)


def _is_hooked(hook: Any) -> bool:
    """Return whether a chain of hooks, or a hook in its place, is set."""
    return bool(getattr(hook, "calls", hook))


def _remember(
    key: tuple[Any, ...], kernel: JITFunction[Any], compiled: Any, given: int, constants: dict[str, Any]
) -> None:
    """Remember a compiled kernel.

    Kernels that a hook intercepted are not remembered, nor those of other GPUs than NVIDIA's, for which Triton may
    specialize by more.
    """
    rest = kernel.params[given:]
    if not all(param.is_constexpr for param in rest):
        raise ValueError(f"{kernel.__name__} is launched with numbers that are given by name")
    if isinstance(compiled, CompiledKernel) and compiled.metadata.target.backend == "cuda":
        if len(_known) >= _MOST_KNOWN:  # bounded, because the number of rows differs between prompts
            _known.clear()
        _known[key] = _Known(kernel, compiled, [constants.get(param.name) for param in rest])
