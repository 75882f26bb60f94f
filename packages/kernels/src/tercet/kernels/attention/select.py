"""Attention backends by name, imported only when one is chosen."""

from collections.abc import Callable
from importlib import import_module

import torch

from tercet.kernels.attention.api import AttentionBackend
from tercet.kernels.errors import UnavailableBackendError
from tercet.kernels.native.library import load_library, missing_library

_BACKENDS = {
    "cpu": "tercet.kernels.attention.cpu:CpuAttention",
    "torch_native": "tercet.kernels.attention.torch_native:TorchNativeAttention",
}


def backend_names() -> list[str]:
    """Every name that `attention_backend` knows, besides `auto`."""
    return sorted(_BACKENDS)


def attention_backend(name: str, device: torch.device) -> Callable[[], AttentionBackend]:
    """A factory of backends, called once for each cache group. `auto` takes the fastest that runs here.

    Raises UnavailableBackendError for a name that does not exist, or cannot be had on this device.
    """
    if name == "auto":
        name = "cpu" if device.type == "cpu" and not missing_library() else "torch_native"
    if name not in _BACKENDS:
        raise UnavailableBackendError(f"no attention backend {name!r}: there are auto, {', '.join(backend_names())}")
    if name == "cpu":
        if device.type != "cpu":
            raise UnavailableBackendError(f"attention backend 'cpu' does not run on {device.type}")
        load_library()
    module, _, attribute = _BACKENDS[name].partition(":")
    factory: Callable[[], AttentionBackend] = getattr(import_module(module), attribute)
    return factory
