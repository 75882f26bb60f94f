"""Attention backends by name, imported only when one is chosen."""

import json
from collections.abc import Callable
from functools import partial
from importlib import import_module, resources

import torch

from tercet.kernels.attention.api import AttentionBackend
from tercet.kernels.attention.flashinfer import FlashInferAttention, GraphMemory, missing_compiler, missing_flashinfer
from tercet.kernels.errors import UnavailableBackendError
from tercet.kernels.native.library import load_library, missing_library
from tercet.kernels.triton import missing_triton

_BACKENDS = {
    "cpu": "tercet.kernels.attention.cpu:CpuAttention",
    "flashinfer": "tercet.kernels.attention.flashinfer:FlashInferAttention",
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
    if name == "flashinfer" and (missing := _no_flashinfer(device)):
        raise UnavailableBackendError(f"attention backend 'flashinfer': {missing}")
    module, _, attribute = _BACKENDS[name].partition(":")
    factory: Callable[[], AttentionBackend] = getattr(import_module(module), attribute)
    return factory


def graph_backend(backend: Callable[[], AttentionBackend]) -> Callable[[], AttentionBackend] | None:
    """A factory for the graphs of one cache group, of which one runs at a time; None where none can be recorded."""
    if not backend().capturable:
        return None
    return partial(FlashInferAttention, memory=GraphMemory()) if backend is FlashInferAttention else backend


def _fastest(device: torch.device) -> str:
    """On a CPU the native kernels; on a GPU FlashInfer where it is proven and ready, else Triton, else torch."""
    if device.type == "cpu":
        return "torch_native" if missing_library() else "cpu"
    unready = _no_flashinfer(device) or missing_compiler()
    if not unready and is_verified("flashinfer", torch.cuda.get_device_capability(device)):
        return "flashinfer"
    return "torch_native" if missing_triton(device) else "triton"


def is_verified(name: str, capability: tuple[int, int]) -> bool:
    """Whether verified.json names a results file in which a backend equals the reference on an architecture."""
    files = json.loads(resources.files(__package__).joinpath("verified.json").read_text(encoding="utf-8"))
    return f"sm{capability[0]}{capability[1]}" in files.get(name, {})


def _no_flashinfer(device: torch.device) -> str:
    if device.type != "cuda":
        return f"it does not run on {device.type}"
    return missing_flashinfer() or missing_triton(device)
