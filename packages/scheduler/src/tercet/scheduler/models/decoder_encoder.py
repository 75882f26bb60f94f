"""Decoders that return vectors or scores instead of text: the same layers, whole inputs, no KV cache."""

import torch
from torch import nn

from tercet.scheduler.models.layers.decoder import Decoder
from tercet.scheduler.models.layers.linear import Linear
from tercet.scheduler.models.layers.packed import Packed


class DecoderEncoder(nn.Module):
    """A decoder without a head. Its checkpoint has the decoder's tensor names, with or without `model.`."""

    def __init__(self, decoder: Decoder) -> None:
        super().__init__()
        self.embed_tokens = decoder.embed_tokens
        self.layers = decoder.layers
        self.norm = decoder.norm
        self._decoder = (decoder,)  # in a tuple, or its weights would have two names

    def forward(self, packed: Packed) -> torch.Tensor:
        """Return the hidden states [tokens, hidden]."""
        hidden: torch.Tensor = self._decoder[0](packed.input_ids, packed.positions, packed)
        return hidden


class DecoderClassifier(DecoderEncoder):
    """A sequence classifier, such as Qwen3ForSequenceClassification: one score per label from the last token's vector.

    As in transformers, the last token is the last one that is not `pad`, if there is one.
    """

    def __init__(self, decoder: Decoder, size: int, labels: int, dtype: torch.dtype, *, pad: int | None) -> None:
        super().__init__(decoder)
        self._pad = pad
        self.score = Linear(size, labels, bias=False, dtype=dtype)

    def scores(self, hidden: torch.Tensor, packed: Packed) -> torch.Tensor:
        """Return scores [inputs, labels] of hidden states [tokens, hidden]."""
        last = packed.last(hidden) if self._pad is None else packed.last_except(hidden, self._pad)
        scores: torch.Tensor = self.score(last)
        return scores
