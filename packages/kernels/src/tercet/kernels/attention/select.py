"""Attention backends by name, imported only when one is chosen."""

from collections.abc import Callable
from importlib import import_module

import torch

from tercet.kernels.attention.api import AttentionBackend
from tercet.kernels.errors import UnavailableBackendError

_BACKENDS = {
    "torch_native": "tercet.kernels.attention.torch_native:TorchNativeAttention",
}

_PREFERRED = {"cpu": ["torch_native"], "cuda": ["torch_native"]}
"""What `auto` tries for each kind of device, best first; other kinds take `torch_native`."""


def backend_names() -> list[str]:
    """Every name that `attention_backend` knows, besides `auto`."""
    return sorted(_BACKENDS)


def attention_backend(name: str, device: torch.device) -> Callable[[], AttentionBackend]:
    """A factory of backends, called once for each cache group. Raises UnavailableBackendError for a bad name."""
    if name == "auto":
        name = _PREFERRED.get(device.type, ["torch_native"])[0]
    if name not in _BACKENDS:
        raise UnavailableBackendError(f"no attention backend {name!r}: there are auto, {', '.join(backend_names())}")
    module, _, attribute = _BACKENDS[name].partition(":")
    factory: Callable[[], AttentionBackend] = getattr(import_module(module), attribute)
    return factory
