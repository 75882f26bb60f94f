"""Detection of the windows of a model's layers from the masks that transformers makes for them.

In transformers' own attention a mask alone decides which tokens a token sees; a layer's `sliding_window` is a hint for
kernels that take no mask, and some models lack it. A forward pass of a short text therefore runs with a probe in place
of the attention: the probe evaluates each mask for single rows, up to the served context length, and records which mask
each layer gets. The cost does not depend on the window's length.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FunctionType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from tercet.scheduler.model_files import ModelError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_PROBE = "tercet_probe"
"""The probe's name in transformers' registry of attention functions."""
_LATER = 16
"""Number of later tokens in a probed row, which reveal a mask that shows them."""
_BIDIRECTIONAL, _IRREGULAR, _BY_TEXT, _OWN = -1, -2, -3, -4
_REASONS = {
    _BIDIRECTIONAL: "a token sees later tokens",
    _IRREGULAR: "a token sees neither all earlier tokens nor a window of the last ones",
    _BY_TEXT: "the mask depends on the text",
    _OWN: "the mask is changed by the layer, or made by the model itself",
}


def probe_windows(model: "PreTrainedModel", text: torch.Tensor, context_length: int) -> dict[int, int]:
    """Return the window of each layer of a model, in tokens, including the token itself; 0 is full attention.

    `text` is [tokens], at least 2. Raise ModelError for layers with other masks.
    """
    from transformers import AttentionInterface, AttentionMaskInterface

    probe = _Probe(context_length)
    AttentionInterface.register(_PROBE, probe.attend)
    AttentionMaskInterface.register(_PROBE, probe.mask)
    with attention_of(model, _PROBE):
        model(input_ids=text[None], use_cache=False)
    for layer, window in sorted(probe.windows.items()):
        if window < 0:
            name = type(model).__name__
            raise ModelError(f"{name} cannot be served: in layer {layer} {_REASONS[window]}")
    return probe.windows


@contextmanager
def attention_of(model: "PreTrainedModel", name: str) -> Iterator[None]:
    """Make all parts of a model use the attention function that transformers has registered under a name."""
    configs: dict[int, Any] = {}
    for module in model.modules():
        config = getattr(module, "config", None)
        if hasattr(config, "_attn_implementation"):
            configs[id(config)] = config
    before = [(config, config._attn_implementation) for config in configs.values()]
    try:
        for config, _ in before:
            config._attn_implementation = name
        yield
    finally:
        for config, old in before:
            config._attn_implementation = old


class _Probe:
    """An attention function that computes nothing, and a mask function whose elements encode the window or a fault."""

    def __init__(self, context_length: int) -> None:
        self._context_length = context_length
        self._given: set[float] = set()
        self.windows: dict[int, int] = {}

    def mask(
        self,
        batch_size: int,
        q_length: int,
        kv_length: int,
        *_: object,
        mask_function: Callable[..., Any],
        use_vmap: bool = False,
        device: torch.device | str = "cpu",
        **__: object,
    ) -> torch.Tensor:
        """Return a mask [batch, 1, queries, keys]."""
        window = float(self._window_of(mask_function, use_vmap=use_vmap))
        self._given.add(window)
        return torch.full((batch_size, 1, q_length, kv_length), window, dtype=torch.float64, device=device)

    def attend(
        self,
        module: nn.Module,
        query: torch.Tensor,
        _: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        **__: object,
    ) -> tuple[torch.Tensor, None]:
        """Record a layer's window; return zeros [batch, tokens, heads, value_dim]."""
        layer: Any = getattr(module, "layer_idx", None)
        if layer is None:
            raise ModelError(f"{type(module).__name__} has no layer_idx: its keys and values cannot be cached")
        if attention_mask is None:  # None means that all tokens are visible
            self.windows[layer] = _BIDIRECTIONAL
        else:
            codes = {*attention_mask.flatten().tolist()}
            known = len(codes) == 1 and codes <= self._given
            self.windows[layer] = int(codes.pop()) if known else _OWN
        return value.new_zeros(query.shape[0], query.shape[2], query.shape[1], value.shape[-1]), None

    def _window_of(self, mask: Callable[..., Any], *, use_vmap: bool) -> int:
        """Return the window of several rows, or a fault if they disagree."""
        if _holds_tensor(mask):
            return _BY_TEXT
        last = self._context_length - 1
        window = _row_window(mask, last, use_vmap=use_vmap)
        if window < 0:
            return window
        window = 0 if window > last else window
        near = {2**power + step for power in range(last.bit_length()) for step in (-1, 0, 1)}
        near |= {window - 1, window, window + 1, last - 1}
        for place in sorted(near):
            if 0 <= place <= last:
                found = _row_window(mask, place, use_vmap=use_vmap)
                if found < 0 or found != min(window or place + 1, place + 1):
                    return found if found < 0 else _IRREGULAR
        return window


def _row_window(mask: Callable[..., Any], place: int, *, use_vmap: bool) -> int:
    """Return the number of last tokens that a token sees, including itself, or a fault."""
    from transformers.masking_utils import sdpa_mask

    row = sdpa_mask(
        batch_size=1,
        q_length=1,
        kv_length=place + 1 + _LATER,
        q_offset=place,
        mask_function=mask,
        allow_is_causal_skip=False,
        use_vmap=use_vmap,
    )
    sees = row.flatten()
    if sees[place + 1 :].any():
        return _BIDIRECTIONAL
    count = int(sees.sum())
    return count if count and sees[place + 1 - count : place + 1].all() else _IRREGULAR


def _holds_tensor(function: Any) -> bool:
    """Return whether a mask function closes over a tensor, directly or through other functions."""
    if isinstance(function, torch.Tensor):
        return True
    if isinstance(function, tuple | list):
        return any(map(_holds_tensor, function))
    if not isinstance(function, FunctionType):
        return False
    return any(_holds_tensor(cell.cell_contents) for cell in function.__closure__ or ())
