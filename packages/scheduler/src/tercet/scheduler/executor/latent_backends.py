"""An `AttentionBackend` for latent attention (MLA): one cached key per token, a prefix of which is the value."""

from collections.abc import Callable

import torch

from tercet.kernels.attention.api import AttentionBackend, AttentionBatch
from tercet.kernels.attention.latent import LatentBackend, LatentSizes, latent_backend


class LatentAttentionBackend:
    """The `AttentionBackend` of latent attention: caches have one head, and values are views of the keys."""

    def __init__(self, backend: LatentBackend) -> None:
        self._backend = backend

    @property
    def capturable(self) -> bool:
        """Return whether CUDA graphs can capture the backend."""
        return self._backend.capturable

    def plan(self, batch: AttentionBatch) -> None:
        """Prepare for a step."""
        self._backend.plan(batch)

    def attend(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        *,
        scale: float,
        window: int = 0,
        softcap: float = 0.0,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attend with q [tokens, heads, head_dim]; return [tokens, heads, rank], where `rank` is the values' length.

        Raise ValueError for windows, soft caps and sinks, which no such model has.
        """
        if window or softcap or sinks is not None:
            raise ValueError("attention over latents has no windows, soft caps or sinks")
        return self._backend.attend(q, k_cache[:, :, 0], rank=v_cache.shape[3], scale=scale)


def latent_attention_backend(
    name: str, device: torch.device, sizes: LatentSizes | None = None
) -> Callable[[], AttentionBackend]:
    """Return a backend factory like that of `latent_backend`. Raise UnavailableBackendError if `name` has no latent
    attention.
    """
    make = latent_backend(name, device, sizes)
    return lambda: LatentAttentionBackend(make())
