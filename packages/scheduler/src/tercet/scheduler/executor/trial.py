"""A few tokens through a model whose modules are not ours, before anything depends on it: can it be served at all?"""

from typing import Any

import torch

from tercet.kernels.attention.api import AttentionBatch
from tercet.kernels.attention.torch_native import TorchNativeAttention
from tercet.scheduler.executor.forward_batch import ForwardBatch
from tercet.scheduler.executor.kv_pool import KVGroup, KVPool, KVShape
from tercet.scheduler.executor.model_config import DecoderShape
from tercet.scheduler.executor.model_runner import Model
from tercet.scheduler.model_files import ModelError

_TOKENS = 8
_FAR = 0.1
"""A relative error of hidden states that rounding in 16 bits never reaches, and text that is missing does."""


@torch.inference_mode()
def try_out(model: Model, shape: DecoderShape, device: torch.device) -> None:
    """Raise ModelError unless keys and values are all that a model keeps of a text, in each layer as the shape says.

    Eight tokens one after another must give the hidden states that they give at once. Otherwise the model keeps earlier
    tokens elsewhere, too, as recurrent layers and convolutions do, and these would be lost.
    """
    pages = KVShape(page_size=_TOKENS, kv_heads=shape.kv_heads, head_dim=shape.head_dim, dtype=shape.dtype)
    pool = KVPool([KVGroup(name="trial", layers=range(shape.layers), pages=1)], pages, device)
    try:
        together = _hidden(model, shape, pool, device, 0, _TOKENS)
        alone = torch.cat([_hidden(model, shape, pool, device, token, 1) for token in range(_TOKENS)])
        logits = model.compute_logits(together[-1:])
    except (TypeError, AttributeError, KeyError, NotImplementedError) as error:
        raise ModelError(f"{shape.architecture} cannot run over a paged cache: {error}") from error
    apart = (together - alone).float().norm(dim=-1) / together.float().norm(dim=-1)
    if not apart.median() < _FAR:
        raise ModelError(f"{shape.architecture} keeps more of a text than keys and values, which is not supported")
    if logits.shape != (1, shape.vocab_size):
        raise ModelError(f"{shape.architecture} has logits {list(logits.shape)} for {shape.vocab_size} tokens")


def _hidden(
    model: Model, shape: DecoderShape, pool: KVPool, device: torch.device, start: int, count: int
) -> torch.Tensor:
    """Hidden states of some tokens of one text, of which those before are in the cache."""
    places = torch.arange(start, start + count, device=device)
    rows = AttentionBatch(
        query_start=torch.tensor([0, count], dtype=torch.int32, device=device),
        kv_lens=torch.tensor([start + count], dtype=torch.int32, device=device),
        page_table=torch.zeros(1, 1, dtype=torch.int32, device=device),
        slot_mapping=places,
        page_size=_TOKENS,
        host_query_lens=[count],
        host_kv_lens=[start + count],
    )
    ids = (places + 1) * 101 % shape.vocab_size  # 0 often is padding, whose embedding is zero
    batch = ForwardBatch.planned(
        input_ids=ids,
        positions=places,
        sample_index=places[-1:],
        attention=[rows],
        backends=[TorchNativeAttention()],
        pool=pool,
    )
    watched: Any = _Watched(batch, shape)
    hidden = model(ids, places, watched)
    if sorted(watched.layers) != list(range(shape.layers)):
        raise ModelError(f"{shape.architecture} attends in layers {watched.layers} of {shape.layers}")
    return hidden


class _Watched:
    """A step that looks at what it is given."""

    def __init__(self, batch: ForwardBatch, shape: DecoderShape) -> None:
        self._batch = batch
        self._expected = [shape.kv_heads, shape.head_dim]
        self.layers: list[int] = []

    def attend(self, layer_id: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **how: Any) -> torch.Tensor:
        for name, heads in (("keys", k), ("values", v)):
            if list(heads.shape[1:]) != self._expected:
                raise ModelError(f"layer {layer_id} has {name} {list(heads.shape[1:])}, not {self._expected}")
        self.layers.append(layer_id)
        return self._batch.attend(layer_id, q, k, v, **how)
