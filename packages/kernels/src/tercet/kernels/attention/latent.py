"""Latent attention (MLA): attention over one cached vector for each token, shared by all heads.

Multi-head latent attention (DeepSeek-V2, https://arxiv.org/abs/2405.04434, section 2.1) caches `rank` elements, from
which both keys and values are projected, and `rope` elements of a rotated key that heads share. A model that absorbs
the key projection into its queries and applies the value projection to the result can attend to the cached vectors
directly.

A backend is an `AttentionBackend` over caches with one head, see `latent_caches`. Scores are products with whole
vectors, values are the first `rank` elements, and the result is [tokens, heads, rank].
"""

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module

import torch

from tercet.kernels.attention.api import AttentionBackend, AttentionParams
from tercet.kernels.errors import UnavailableBackendError
from tercet.kernels.native.library import load_library, missing_library
from tercet.kernels.triton import missing_triton

_BACKENDS = {
    "cpu": "tercet.kernels.attention.cpu:CpuLatent",
    "torch_native": "tercet.kernels.attention.torch_native:TorchNativeLatent",
    "triton": "tercet.kernels.attention.triton_latent:TritonLatent",
}


@dataclass(frozen=True, kw_only=True)
class LatentSizes:
    """Sizes and dtypes of latent attention in a model."""

    rank: int
    rope: int
    dtype: torch.dtype  # of queries
    cached: torch.dtype


def latent_caches(vectors: torch.Tensor, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cached vectors [pages, page_size, rank + rope] as caches of keys and values with one head.

    The values are a view of the keys.
    """
    keys = vectors[:, :, None]
    return keys, keys[..., :rank]


def latent_rank(v_cache: torch.Tensor, params: AttentionParams) -> int:
    """Return the number of a key's elements that are its value.

    Raises ValueError for windows, soft caps and sinks, which no such model has.
    """
    if params.window or params.softcap or params.sinks is not None:
        raise ValueError("attention over latents has no windows, soft caps or sinks")
    return v_cache.shape[3]


def latent_backend_names() -> list[str]:
    """Return the names that `latent_backend` accepts besides `auto`."""
    return sorted(_BACKENDS)


def latent_backend(name: str, device: torch.device, sizes: LatentSizes | None = None) -> Callable[[], AttentionBackend]:
    """Return a factory of backends, to be called once for each cache group.

    `auto` selects the fastest that runs here. Without `sizes`, shared memory is not checked. Raises
    UnavailableBackendError for a name that does not exist or is not available on this device.
    """
    if name == "auto":
        name = _fastest(device, sizes)
    if name not in _BACKENDS:
        names = ", ".join(latent_backend_names())
        raise UnavailableBackendError(f"no backend {name!r} of latent attention: there are auto, {names}")
    if name == "cpu":
        if device.type != "cpu":
            raise UnavailableBackendError(f"backend 'cpu' of latent attention does not run on {device.type}")
        load_library()
    if name == "triton" and (missing := _no_triton(device, sizes)):
        raise UnavailableBackendError(f"backend 'triton' of latent attention: {missing}")
    module, _, attribute = _BACKENDS[name].partition(":")
    factory: Callable[[], AttentionBackend] = getattr(import_module(module), attribute)
    return factory


def _fastest(device: torch.device, sizes: LatentSizes | None) -> str:
    """Return "cpu" or "triton" where their kernels run, otherwise "torch_native"."""
    if device.type == "cpu":
        return "torch_native" if missing_library() else "cpu"
    return "torch_native" if _no_triton(device, sizes) else "triton"


def _no_triton(device: torch.device, sizes: LatentSizes | None) -> str:
    """Return why the Triton kernels cannot run; empty if they can."""
    if (missing := missing_triton(device)) or sizes is None:
        return missing
    from tercet.kernels.attention.triton_latent import missing_memory

    return missing_memory(device, sizes)
