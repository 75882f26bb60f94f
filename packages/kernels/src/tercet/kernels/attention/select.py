"""Attention backends: names, where they run, and the choice of one. A backend is imported only if it is chosen."""

import json
from collections.abc import Callable
from functools import partial
from importlib import import_module, resources

import torch

from tercet.kernels.attention.api import AttentionBackend
from tercet.kernels.attention.flashinfer import FlashInferAttention, GraphMemory, missing_compiler, missing_flashinfer
from tercet.kernels.attention.latent import LatentSizes
from tercet.kernels.attention.prompts import missing_cudnn
from tercet.kernels.errors import UnavailableBackendError
from tercet.kernels.native.library import missing_library
from tercet.kernels.triton import missing_triton


class Backend:
    """Entry in `BACKENDS`, which is read before the backend is imported. The defaults mean that it runs everywhere."""

    name: str
    attention: str
    """Module and class of the `AttentionBackend`."""
    latent: str = ""
    """Module and class of the one for latent attention; empty if there is none."""

    def unavailable(self, device: torch.device, latent: LatentSizes | None) -> str:  # noqa: ARG002
        """Return why it cannot run on a device, or not for latent attention of these sizes; empty if it can."""
        return ""

    def preferred(self, device: torch.device) -> bool:  # noqa: ARG002
        """Return whether `auto` may select it on a device where it can run."""
        return True


class _Cpu(Backend):
    name = "cpu"
    attention = "tercet.kernels.attention.cpu:CpuAttention"
    latent = "tercet.kernels.attention.cpu:CpuLatent"

    def unavailable(self, device: torch.device, latent: LatentSizes | None) -> str:  # noqa: ARG002
        return missing_library() if device.type == "cpu" else f"it does not run on {device.type}"


class _FlashInfer(Backend):
    name = "flashinfer"
    attention = "tercet.kernels.attention.flashinfer:FlashInferAttention"

    def unavailable(self, device: torch.device, latent: LatentSizes | None) -> str:  # noqa: ARG002
        if device.type != "cuda":
            return f"it does not run on {device.type}"
        return missing_flashinfer() or missing_triton(device)

    def preferred(self, device: torch.device) -> bool:
        return not missing_compiler() and is_verified(self.name, torch.cuda.get_device_capability(device))


class _Triton(Backend):
    name = "triton"
    attention = "tercet.kernels.attention.triton:TritonAttention"
    latent = "tercet.kernels.attention.triton_latent:TritonLatent"

    def unavailable(self, device: torch.device, latent: LatentSizes | None) -> str:
        if (missing := missing_triton(device)) or latent is None:
            return missing
        from tercet.kernels.attention.triton_latent import missing_memory

        return missing_memory(device, latent)

    def preferred(self, device: torch.device) -> bool:
        return device.type != "cpu"  # the interpreter is for tests


class _Cudnn(Backend):
    name = "cudnn"
    attention = "tercet.kernels.attention.prompts:cudnn_attention"
    latent = "tercet.kernels.attention.prompt_latents:cudnn_latent"

    def unavailable(self, device: torch.device, latent: LatentSizes | None) -> str:
        if device.type != "cuda":
            return f"it does not run on {device.type}"
        return missing_cudnn(device) or _Triton().unavailable(device, latent)


class _TorchNative(Backend):
    name = "torch_native"
    attention = "tercet.kernels.attention.torch_native:TorchNativeAttention"
    latent = "tercet.kernels.attention.torch_native:TorchNativeLatent"


BACKENDS: tuple[Backend, ...] = (_Cpu(), _FlashInfer(), _Cudnn(), _Triton(), _TorchNative())
"""All backends, in the order in which `auto` tries them."""


def backend_names(*, latent: bool = False) -> list[str]:
    """Return the names of all backends, or of those for latent attention."""
    return sorted(backend.name for backend in BACKENDS if backend.latent or not latent)


def attention_backend(
    name: str, device: torch.device, latent: LatentSizes | None = None
) -> Callable[[], AttentionBackend]:
    """Return a factory of backends, to be called once for each cache group; for latent attention if `latent` is given.

    `auto` selects the fastest that runs here. Raises UnavailableBackendError for a name that does not exist or is not
    available on this device.
    """
    backend = select_backend(name, device, latent)
    module, _, attribute = (backend.latent if latent else backend.attention).partition(":")
    factory: Callable[[], AttentionBackend] = getattr(import_module(module), attribute)
    return factory


def select_backend(name: str, device: torch.device, latent: LatentSizes | None = None) -> Backend:
    """Return the entry of a name, which `attention_backend` then imports. Raises UnavailableBackendError."""
    backends = {backend.name: backend for backend in BACKENDS if backend.latent or not latent}
    if name == "auto":
        usable = (each for each in backends.values() if not each.unavailable(device, latent) and each.preferred(device))
        return next(usable)
    titled = f"backend {name!r} of latent attention" if latent else f"attention backend {name!r}"
    if name not in backends:
        raise UnavailableBackendError(f"no {titled}: there are auto, {', '.join(sorted(backends))}")
    if missing := backends[name].unavailable(device, latent):
        raise UnavailableBackendError(f"{titled}: {missing}")
    return backends[name]


def graph_backend(backend: Callable[[], AttentionBackend]) -> Callable[[], AttentionBackend] | None:
    """Return a factory for the CUDA graphs of one cache group, or None if decodes cannot be captured.

    Only one of these graphs may run at a time.
    """
    if not backend().capturable:
        return None
    return partial(FlashInferAttention, memory=GraphMemory()) if backend is FlashInferAttention else backend


def is_verified(name: str, capability: tuple[int, int]) -> bool:
    """Return whether verified.json names results in which a backend equals the reference on an architecture."""
    files = json.loads(resources.files(__package__).joinpath("verified.json").read_text(encoding="utf-8"))
    return f"sm{capability[0]}{capability[1]}" in files.get(name, {})
