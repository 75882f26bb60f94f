"""Encoders on a CPU whose layers compute a part of their rows at a time, and may pause in between.

An image of 8,192 patches takes a second in a single layer. In parts it can be computed in slices of time, beside the
steps of a running batch.
"""

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
from torch import nn

from tercet.scheduler.device.time_slices import pause, rows_of_part
from tercet.scheduler.models.native_linear import NativeLinear

_NAME = "tercet_sliced"
_ACTIVATION = 150
"""Operations of a value of an activation function, for the time that it takes."""
_ACTIVATIONS = ("transformers.activations", "torch.nn.modules.activation")
"""Modules of torch and transformers that define activation functions."""


def slice_work(encoder: nn.Module) -> None:
    """Let the attention and the linear layers of transformers' modules compute in parts."""
    for module in encoder.modules():
        config: Any = getattr(module, "config", None)
        if getattr(config, "_attn_implementation", None) == "sdpa":
            config._attn_implementation = _registered()
        outputs = None
        if type(module) is nn.Linear or isinstance(module, NativeLinear):
            outputs = module.out_features
        elif type(module).__module__ not in _ACTIVATIONS or isinstance(module, nn.MultiheadAttention):
            continue
        forward: Callable[[torch.Tensor], torch.Tensor] = module.forward
        # a method of the class would be the same for all, and hooks run before and after all parts
        module.forward = partial(_in_parts, forward, outputs)


def _in_parts(forward: Callable[[torch.Tensor], torch.Tensor], outputs: int | None, x: torch.Tensor) -> torch.Tensor:
    """Return the result [..., outputs] for x [..., inputs]; with `outputs` None that of an activation function."""
    flat = x.reshape(-1, x.shape[-1])
    rows = rows_of_part(x.shape[-1] * (_ACTIVATION if outputs is None else 2 * outputs))
    outputs = outputs or x.shape[-1]
    if len(flat) <= rows:
        pause()
        return forward(x)
    out = torch.empty(len(flat), outputs, dtype=x.dtype)
    for first in range(0, len(flat), rows):
        out[first : first + rows] = forward(flat[first : first + rows])
        pause()
    return out.view(*x.shape[:-1], outputs)


@cache
def _registered() -> str:
    """Register the attention in parts with transformers, and return its name."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import sdpa_mask

    AttentionInterface.register(_NAME, partial(_attend, sdpa_attention_forward))
    AttentionMaskInterface.register(_NAME, sdpa_mask)
    return _NAME


def _attend(
    whole: Callable[..., tuple[torch.Tensor, None]],
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **more: Any,
) -> tuple[torch.Tensor, None]:
    """Compute attention without causality: [batch, heads, tokens, head_dim] -> [batch, tokens, heads, head_dim]."""
    batch, heads, _, size = query.shape
    parts: list[torch.Tensor] = []
    rows = rows_of_part(4 * batch * heads * size * key.shape[2])
    for first in range(0, query.shape[2], rows):
        mask = attention_mask
        if mask is not None and mask.shape[2] > 1:
            mask = mask[:, :, first : first + rows]
        part = query[:, :, first : first + rows]
        parts.append(whole(module, part, key, value, mask, **{**more, "is_causal": False})[0])
        pause()
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1), None
