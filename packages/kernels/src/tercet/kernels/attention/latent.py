"""Latent attention (MLA): attention over one cached vector for each token, shared by all heads.

Multi-head latent attention (DeepSeek-V2, https://arxiv.org/abs/2405.04434, section 2.1) caches `rank` elements, from
which both keys and values are projected, and `rope` elements of a rotated key that heads share. A model that absorbs
the key projection into its queries and applies the value projection to the result can attend to the cached vectors
directly. This module has the interface, and backends by name.
"""

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Protocol

import torch

from tercet.kernels.attention.api import AttentionBatch
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


class LatentBackend(Protocol):
    """Implementation of latent attention. An instance belongs to one cache group and holds the plan of one step."""

    @property
    def capturable(self) -> bool:
        """True if a decode may be captured in a CUDA graph: see `AttentionBackend.capturable`."""
        ...

    def plan(self, batch: AttentionBatch) -> None:
        """Prepare a step; called once, before `attend` of the first layer."""
        ...

    def attend(self, q: torch.Tensor, cache: torch.Tensor, *, rank: int, scale: float) -> torch.Tensor:
        """Return the attention of q [tokens, heads, rank + rope] over a cache [pages, page_size, rank + rope].

        The cache already contains the vectors of the new tokens; its dtype may differ from that of q. Scores are
        products with whole vectors; values are the first `rank` elements. The result is [tokens, heads, rank] in q's
        dtype.
        """
        ...


def latent_backend_names() -> list[str]:
    """Return the names that `latent_backend` accepts besides `auto`."""
    return sorted(_BACKENDS)


def latent_backend(name: str, device: torch.device, sizes: LatentSizes | None = None) -> Callable[[], LatentBackend]:
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
    factory: Callable[[], LatentBackend] = getattr(import_module(module), attribute)
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
