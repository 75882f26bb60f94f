"""Selection of attention backends by name. A backend is imported only if it is chosen."""

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
    """Return the names that `attention_backend` accepts besides `auto`."""
    return sorted(_BACKENDS)


def attention_backend(name: str, device: torch.device) -> Callable[[], AttentionBackend]:
    """Return a factory of backends, to be called once for each cache group.

    `auto` selects the fastest that runs here. Raises UnavailableBackendError for a name that does not exist or is not
    available on this device.
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
    """Return a factory for the CUDA graphs of one cache group, or None if decodes cannot be captured.

    Only one of these graphs may run at a time.
    """
    if not backend().capturable:
        return None
    return partial(FlashInferAttention, memory=GraphMemory()) if backend is FlashInferAttention else backend


def _fastest(device: torch.device) -> str:
    """Return the name of the fastest backend.

    On a CPU that is the native library; on a GPU FlashInfer if it is verified and compiled, then Triton, then plain
    torch.
    """
    if device.type == "cpu":
        return "torch_native" if missing_library() else "cpu"
    unready = _no_flashinfer(device) or missing_compiler()
    if not unready and is_verified("flashinfer", torch.cuda.get_device_capability(device)):
        return "flashinfer"
    return "torch_native" if missing_triton(device) else "triton"


def is_verified(name: str, capability: tuple[int, int]) -> bool:
    """Return whether verified.json names results in which a backend equals the reference on an architecture."""
    files = json.loads(resources.files(__package__).joinpath("verified.json").read_text(encoding="utf-8"))
    return f"sm{capability[0]}{capability[1]}" in files.get(name, {})


def _no_flashinfer(device: torch.device) -> str:
    if device.type != "cuda":
        return f"it does not run on {device.type}"
    return missing_flashinfer() or missing_triton(device)
