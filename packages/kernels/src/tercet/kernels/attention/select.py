"""Attention backends by name, imported only when one is chosen."""

from collections.abc import Callable
from importlib import import_module

import torch

from tercet.kernels.attention.api import AttentionBackend
from tercet.kernels.errors import UnavailableBackendError
from tercet.kernels.native.library import load_library, missing_library
from tercet.kernels.triton import missing_triton

_BACKENDS = {
    "cpu": "tercet.kernels.attention.cpu:CpuAttention",
    "torch_native": "tercet.kernels.attention.torch_native:TorchNativeAttention",
    "triton": "tercet.kernels.attention.triton:TritonAttention",
}


def backend_names() -> list[str]:
    """Every name that `attention_backend` knows, besides `auto`."""
    return sorted(_BACKENDS)


def attention_backend(name: str, device: torch.device) -> Callable[[], AttentionBackend]:
    """A factory of backends, called once for each cache group. `auto` takes the fastest that runs here.

    Raises UnavailableBackendError for a name that does not exist, or cannot be had on this device.
    """
    if name == "auto":
        name = _fastest(device)
    if name not in _BACKENDS:
        raise UnavailableBackendError(f"no attention backend {name!r}: there are auto, {', '.join(backend_names())}")
    if name == "cpu":
        if device.type != "cpu":
            raise UnavailableBackendError(f"attention backend 'cpu' does not run on {device.type}")
        load_library()
    if name == "triton" and (missing := missing_triton(device)):
        raise UnavailableBackendError(f"attention backend 'triton': {missing}")
    module, _, attribute = _BACKENDS[name].partition(":")
    factory: Callable[[], AttentionBackend] = getattr(import_module(module), attribute)
    return factory


def _fastest(device: torch.device) -> str:
    """The native kernels on a CPU, Triton on a GPU, and torch where they are not."""
    if device.type == "cpu":
        return "torch_native" if missing_library() else "cpu"
    return "torch_native" if missing_triton(device) else "triton"
