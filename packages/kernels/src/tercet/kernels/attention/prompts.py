"""Attention of long prompts without a cached beginning by a fused kernel of torch's (cuDNN), all else by Triton's.

The keys and values of such a prompt are its own new tokens, so no pages are read. cuDNN makes a plan for every length,
so a prompt is padded to one of sixteen lengths an octave: causal attention never sees what follows a token.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Generic, TypeVar

import torch
import torch.nn.functional as F  # noqa: N812
from torch.nn.attention import SDPBackend, sdpa_kernel

from tercet.kernels.attention.api import AttentionBackend, AttentionBatch, AttentionParams, NewTokens, RotatingBackend
from tercet.kernels.device import has_failed
from tercet.kernels.pinned import pinned

logger = logging.getLogger(__name__)

LEAST_TOKENS = {90: 2048}
"""Shortest prompt that cuDNN computes, by architecture; others have not been measured.

H100, torch 2.11, causal, 32 heads over 8 of 128, bfloat16, cuDNN and ours: one prompt of 8,192 tokens 613 and 305
TFLOP/s. Four of 2,048 took cuDNN 261 us there, and ours 439 us on an H200. Sixteen of 512 took cuDNN 97 us; ours was
not measured."""

_WIDEST = 128
"""Largest head that cuDNN computes on every architecture."""

_TRIED = 192
"""Tokens of the prompt by which a kernel is tried."""

_ALLOWED = 0.03
"""Allowed difference of a result of numbers around 1 in 16 bits."""

BackendT = TypeVar("BackendT", bound=AttentionBackend)

Kernel = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, float], torch.Tensor]
"""Causal attention of q [1, heads, tokens, head_dim], k and v [1, kv_heads, tokens, head_dim] with a scale."""


def sdpa(backend: SDPBackend) -> Kernel:
    """Return torch's attention by one of its backends. It raises RuntimeError for sizes that the backend refuses."""

    def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True)

    return run


def cudnn_attention() -> "PromptAttention":
    """Return the backend `cudnn`, for the architectures of `LEAST_TOKENS`."""
    from tercet.kernels.attention.triton import TritonAttention

    least = LEAST_TOKENS[architecture(torch.device("cuda"))]
    return PromptAttention(TritonAttention, sdpa(SDPBackend.CUDNN_ATTENTION), least)


def missing_cudnn(device: torch.device) -> str:
    """Return why cuDNN does not compute prompts on a GPU; empty if it does."""
    if not torch.backends.cudnn.is_available():  # type: ignore[no-untyped-call]
        return "this build of torch has no cuDNN"
    found = architecture(device)
    return "" if found in LEAST_TOKENS else f"it has not been measured on sm{found}"


def padded_length(length: int) -> int:
    """Return the length to which a prompt is padded: a multiple of a sixteenth of the power of two below it."""
    step = max(16, 1 << max(0, (length - 1).bit_length() - 5))
    return -(-length // step) * step


def long_prompts(batch: AttentionBatch, least: int) -> list[int]:
    """Return the rows that are prompts of at least `least` tokens without a cached beginning."""
    if batch.seen is not None or batch.max_query < least:
        return []
    lengths = zip(batch.host_query_lens, batch.host_kv_lens, strict=True)
    return [row for row, (new, kept) in enumerate(lengths) if new == kept >= least]


def without_rows(batch: AttentionBatch, rows: list[int]) -> tuple[AttentionBatch, torch.Tensor]:
    """Return the batch of the other rows, and the places of their tokens in the step, int64 [tokens]."""
    device, left = batch.page_table.device, [row for row in range(batch.rows) if row not in set(rows)]
    starts = [0, *accumulate(batch.host_query_lens)]
    places = [place for row in left for place in range(starts[row], starts[row + 1])]
    query_lens = [batch.host_query_lens[row] for row in left]
    numbers = [*left, *places, 0, *accumulate(query_lens)]
    on_device = pinned(torch.tensor(numbers), device).to(device, non_blocking=True)
    index, tokens, begins = torch.split(on_device, [len(left), len(places), len(left) + 1])
    rest = replace(
        batch,
        query_start=begins.int(),
        kv_lens=batch.kv_lens[index],
        page_table=batch.page_table[index],
        slot_mapping=batch.slot_mapping[tokens],
        host_query_lens=query_lens,
        host_kv_lens=[batch.host_kv_lens[row] for row in left],
    )
    return rest, tokens


@dataclass(frozen=True, eq=False)
class Prompt:
    """Prompt of a step: tokens [first, last), and the slots of its padded keys, int64 [padded]."""

    first: int
    last: int
    slots: torch.Tensor

    @property
    def padding(self) -> int:
        """Number of padded tokens."""
        return len(self.slots) - (self.last - self.first)

    def queries(self, q: torch.Tensor) -> torch.Tensor:
        """Return the prompt's part of q [tokens, heads, dim], padded: [1, heads, padded, dim]."""
        mine = q[self.first : self.last]
        if self.padding:
            mine = F.pad(mine, (0, 0, 0, 0, 0, self.padding))
        return mine.transpose(0, 1)[None]

    def gather(self, cache: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return the padded keys or values: [1, kv_heads, padded, head_dim] in `dtype`."""
        return cache.flatten(0, 1)[self.slots].to(dtype).transpose(0, 1)[None]


class PromptPlan(Generic[BackendT]):
    """Plan of a step: its long prompts, and backends of one kind planned for the whole step and for the other rows."""

    def __init__(self, make: Callable[[], BackendT], least: int) -> None:
        self.whole, self.rest = make(), make()
        self._least = least
        self.prompts: list[Prompt] = []
        self.others: torch.Tensor | None = None
        """Places of the tokens of other rows, int64; None if there are none."""

    def set_batch(self, batch: AttentionBatch) -> None:
        """Find the long prompts, and plan both backends."""
        self.prompts, self.others = [], None
        self.whole.plan(batch)
        rows = long_prompts(batch, self._least)
        if not rows:
            return
        starts = [0, *accumulate(batch.host_query_lens)]
        for row in rows:
            slots = batch.slot_mapping[starts[row] : starts[row + 1]]
            spare = padded_length(len(slots)) - len(slots)
            if spare:
                slots = torch.cat([slots, slots[-1:].expand(spare)])
            self.prompts.append(Prompt(starts[row], starts[row + 1], slots))
        if len(rows) < batch.rows:
            rest, self.others = without_rows(batch, rows)
            self.rest.plan(rest)


class PromptAttention:
    """Backend with a kernel of its own for long prompts, a `RotatingBackend` over others of one kind.

    A kernel is tried once for every size of heads, against the definition; where it is refused or wrong, the other
    backend computes those layers.
    """

    bidirectional = False

    def __init__(self, make: Callable[[], RotatingBackend], kernel: Kernel, least: int) -> None:
        self._plan = PromptPlan(make, least)
        self._kernel = kernel
        self._right: dict[tuple[int, int, int, torch.dtype], bool] = {}

    @property
    def capturable(self) -> bool:
        """See `AttentionBackend.capturable`. Decodes are the other backend's."""
        return self._plan.whole.capturable

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
        plan = self._plan
        if not plan.prompts or not self._fits(q, k_cache.shape[2], params):
            return plan.whole.attend(q, k_cache, v_cache, params, key_scale)
        scale = params.scale * key_scale
        parts = [self._attend_prompt(prompt, q, k_cache, v_cache, scale) for prompt in plan.prompts]
        if len(parts) == 1 and plan.others is None:
            return parts[0].contiguous()
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        for prompt, part in zip(plan.prompts, parts, strict=True):
            out[prompt.first : prompt.last] = part
        if plan.others is not None:
            out[plan.others] = plan.rest.attend(q[plan.others], k_cache, v_cache, params, key_scale)
        return out

    def attend_new(
        self, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, new: NewTokens, params: AttentionParams
    ) -> torch.Tensor:
        """See `RotatingBackend.attend_new`."""
        return self._plan.whole.attend_new(q, k_cache, v_cache, new, params)

    def _attend_prompt(
        self, prompt: Prompt, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, scale: float
    ) -> torch.Tensor:
        """Return the attention of a prompt, [tokens, heads, head_dim]."""
        k, v = prompt.gather(k_cache, q.dtype), prompt.gather(v_cache, q.dtype)
        out = self._kernel(prompt.queries(q), k, v, scale)[0].transpose(0, 1)
        return out[: prompt.last - prompt.first]

    def _fits(self, q: torch.Tensor, kv_heads: int, params: AttentionParams) -> bool:
        """Return whether the kernel computes such layers, and rightly here."""
        _, heads, dim = q.shape
        if params.window or params.softcap or params.sinks is not None or dim > _WIDEST or dim % 8:
            return False
        sizes = heads, kv_heads, dim, q.dtype
        if sizes not in self._right:
            self._right[sizes] = q.element_size() == 2 and is_right(self._kernel, q, kv_heads, dim)
        return self._right[sizes]


def is_right(kernel: Kernel, q: torch.Tensor, kv_heads: int, value_dim: int) -> bool:
    """Return whether a kernel gives the definition's result for heads like those of q, on its device; log why not.

    Values have `value_dim` elements.

    Raises the error of a device that fails.
    """
    chance = torch.Generator(q.device).manual_seed(0)
    heads, dim = q.shape[1:]
    sizes = ((1, heads, _TRIED, dim), (1, kv_heads, _TRIED, dim), (1, kv_heads, _TRIED, value_dim))
    given = [torch.randn(size, generator=chance, device=q.device).to(q.dtype) for size in sizes]
    try:
        found = kernel(given[0], given[1], given[2], dim**-0.5)
    except RuntimeError as error:
        if has_failed(error):
            raise
        logger.info("prompt kernel refused: heads=%d kv_heads=%d dim=%d: %s", heads, kv_heads, dim, error)
        return False
    wide = [each.float() for each in given]
    wanted = sdpa(SDPBackend.MATH)(wide[0], wide[1], wide[2], dim**-0.5)
    far = float((found.float() - wanted).abs().max())
    if not far <= _ALLOWED:
        logger.warning("prompt kernel is wrong: far=%.3g heads=%d kv_heads=%d dim=%d", far, heads, kv_heads, dim)
    return far <= _ALLOWED


def architecture(device: torch.device) -> int:
    """Return a GPU's compute capability as two digits."""
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor
