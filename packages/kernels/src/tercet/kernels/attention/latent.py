"""Attention over one cached vector for each token, the same for all heads: its interface, and backends by name.

Multi-head latent attention (DeepSeek-V2, https://arxiv.org/abs/2405.04434, section 2.1) caches `rank` elements from
which keys and values are both projected, and `rope` elements of a key that is rotated and shared. A model that puts the
projection of keys into its queries, and that of values behind what comes back, attends to cached vectors as they are.
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
    """What a model attends with, and to."""

    rank: int
    rope: int
    dtype: torch.dtype  # of queries
    cached: torch.dtype


class LatentBackend(Protocol):
    """One way of computing it. An instance belongs to one cache group and holds the plan of one step."""

    @property
    def capturable(self) -> bool:
        """Whether a decode may be recorded in a graph: see `AttentionBackend.capturable`."""
        ...

    def plan(self, batch: AttentionBatch) -> None:
        """Prepare for a step: called once, before the `attend` of every layer."""
        ...

    def attend(self, q: torch.Tensor, cache: torch.Tensor, *, rank: int, scale: float) -> torch.Tensor:
        """Attention of q [tokens, heads, rank + rope] over a cache [pages, page_size, rank + rope].

        The new tokens' vectors are in the cache already, which may be of another dtype than q. Scores are products with
        whole vectors, values the first `rank` elements of each. Returns [tokens, heads, rank] in q's dtype.
        """
        ...


def latent_backend_names() -> list[str]:
    """Every name that `latent_backend` knows, besides `auto`."""
    return sorted(_BACKENDS)


def latent_backend(name: str, device: torch.device, sizes: LatentSizes | None = None) -> Callable[[], LatentBackend]:
    """A factory of backends, called once for each cache group. `auto` takes the fastest that runs here.

    Without `sizes` it is not asked whether the device has memory for them. Raises UnavailableBackendError for a name
    that does not exist, or cannot be had on this device.
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
    """On a CPU the native kernels; on a GPU Triton's; plain torch where there are none."""
    if device.type == "cpu":
        return "torch_native" if missing_library() else "cpu"
    return "torch_native" if _no_triton(device, sizes) else "triton"


def _no_triton(device: torch.device, sizes: LatentSizes | None) -> str:
    """Why Triton's kernels cannot run; empty where they can."""
    if (missing := missing_triton(device)) or sizes is None:
        return missing
    from tercet.kernels.attention.triton_latent import missing_memory

    return missing_memory(device, sizes)
