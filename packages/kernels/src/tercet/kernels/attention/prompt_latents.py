"""Latent attention of long prompts without a cached beginning in expanded form, by a fused kernel of torch's.

The latents of such a prompt are projected to the keys and values of every head once, and attention is that of plain
heads: for DeepSeek-V2-Lite 192 + 128 products for a query and a key, where 576 + 512 are needed over latents. All else
is computed over latents, by another backend.
"""

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F  # noqa: N812
from torch.nn.attention import SDPBackend

from tercet.kernels.attention.api import AttentionBackend, AttentionBatch, AttentionParams, LatentQueries
from tercet.kernels.attention.latent import absorbed, latent_caches, values_of
from tercet.kernels.attention.prompts import Kernel, Prompt, PromptPlan, architecture, is_right, sdpa

LEAST_TOKENS = {90: 1024}
"""Shortest prompt in expanded form, by architecture: an estimate, not a measurement.

Over latents our kernel gave 101 TFLOP/s on an H100, and torch's flash attention 323 over heads of 128."""


def with_wide_values(kernel: Kernel) -> Kernel:
    """Return a kernel for which values are padded to the size of keys."""

    def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
        size = v.shape[3]
        return kernel(q, k, F.pad(v, (0, q.shape[3] - size)), scale)[..., :size]

    return run


def latent_kernels() -> list[Kernel]:
    """Return the kernels that are tried on a GPU, in that order."""
    cudnn, flash = sdpa(SDPBackend.CUDNN_ATTENTION), sdpa(SDPBackend.FLASH_ATTENTION)
    return [cudnn, with_wide_values(cudnn), with_wide_values(flash)]


def cudnn_latent() -> "PromptLatent":
    """Return the backend `cudnn` of latent attention, for the architectures of `LEAST_TOKENS`."""
    from tercet.kernels.attention.triton_latent import TritonLatent

    return PromptLatent(TritonLatent, latent_kernels(), LEAST_TOKENS[architecture(torch.device("cuda"))])


class PromptLatent:
    """Backend with kernels of its own for long prompts, an `ExpandingBackend` over others of one kind.

    The first of the kernels that gives the definition's result for the sizes of a model is used; without one, the
    other backend computes everything.
    """

    bidirectional = False

    def __init__(self, make: Callable[[], AttentionBackend], kernels: Sequence[Kernel], least: int) -> None:
        self._plan = PromptPlan(make, least)
        self._kernels = kernels
        self._chosen: dict[tuple[int, int, int, torch.dtype], Kernel | None] = {}

    @property
    def capturable(self) -> bool:
        """See `AttentionBackend.capturable`. Decodes are the other backend's."""
        return self._plan.whole.capturable

    @property
    def expands(self) -> bool:
        """See `ExpandingBackend.expands`."""
        return bool(self._plan.prompts)

    def plan(self, batch: AttentionBatch) -> None:
        """See `AttentionBackend.plan`."""
        self._plan.set_batch(batch)

    def attend(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        params: AttentionParams,
        key_scale: float = 1.0,
    ) -> torch.Tensor:
        """See `AttentionBackend.attend`."""
        return self._plan.whole.attend(q, k_cache, v_cache, params, key_scale)

    def attend_expanded(
        self, queries: LatentQueries, k_cache: torch.Tensor, params: AttentionParams, key_scale: float = 1.0
    ) -> torch.Tensor:
        """See `ExpandingBackend.attend_expanded`."""
        plan, kernel = self._plan, self.kernel_for(queries)
        cache = k_cache[:, :, 0]
        caches = latent_caches(cache, queries.w_uk.shape[2])
        if kernel is None:
            out = plan.whole.attend(absorbed(queries), *caches, params, key_scale)
            return values_of(out, queries.w_uv)
        q_nope, q_pe, w_uk, w_uv = queries
        out = q_nope.new_empty(*q_nope.shape[:2], w_uv.shape[1])
        for prompt in plan.prompts:
            found = _attend_prompt(kernel, prompt, queries, cache, params.scale * key_scale)
            out[prompt.first : prompt.last] = found
        if plan.others is not None:
            others = LatentQueries(q_nope[plan.others], q_pe[plan.others], w_uk, w_uv)
            rest = plan.rest.attend(absorbed(others), *caches, params, key_scale)
            out[plan.others] = values_of(rest, w_uv)
        return out

    def kernel_for(self, queries: LatentQueries) -> Kernel | None:
        """Return the first kernel that computes heads of these sizes rightly here."""
        q_nope, q_pe, _, w_uv = queries
        heads, dim = q_nope.shape[1], q_nope.shape[2] + q_pe.shape[2]
        sizes = heads, dim, w_uv.shape[1], q_nope.dtype
        if sizes not in self._chosen:
            like = q_nope.new_empty(1, heads, dim)
            right = (kernel for kernel in self._kernels if is_right(kernel, like, heads, w_uv.shape[1]))
            self._chosen[sizes] = next(right, None)
        return self._chosen[sizes]


def _attend_prompt(
    kernel: Kernel, prompt: Prompt, queries: LatentQueries, cache: torch.Tensor, scale: float
) -> torch.Tensor:
    """Return the attention of a prompt, [tokens, heads, value_dim]."""
    q_nope, q_pe, w_uk, w_uv = queries
    vectors = cache.flatten(0, 1)[prompt.slots].to(q_nope.dtype)
    latents, key = torch.split(vectors, [w_uk.shape[2], q_pe.shape[2]], 1)
    keys = torch.cat([torch.matmul(latents, w_uk.mT), key.expand(len(w_uk), -1, -1)], 2)  # [heads, padded, dim]
    values = torch.matmul(latents, w_uv.mT)
    mine = slice(prompt.first, prompt.last)
    whole = Prompt(0, prompt.last - prompt.first, prompt.slots)
    q = whole.queries(torch.cat([q_nope[mine], q_pe[mine]], 2))
    out = kernel(q, keys[None], values[None], scale)[0].transpose(0, 1)
    return out[: whole.last]
