"""A decoder that gives vectors or scores instead of text: the same layers, each input whole, nothing cached."""

import torch
from torch import nn

from tercet.scheduler.models.layers.decoder import Decoder
from tercet.scheduler.models.layers.linear import Linear
from tercet.scheduler.models.layers.packed import Packed


class DecoderEncoder(nn.Module):
    """Its checkpoint has the decoder's names, under `model.` or under nothing."""

    def __init__(self, decoder: Decoder) -> None:
        super().__init__()
        self.embed_tokens = decoder.embed_tokens
        self.layers = decoder.layers
        self.norm = decoder.norm
        self._decoder = (decoder,)  # in a tuple, or its weights would have two names

    def forward(self, packed: Packed) -> torch.Tensor:
        """[tokens, hidden]."""
        hidden: torch.Tensor = self._decoder[0](packed.input_ids, packed.positions, packed)
        return hidden


class DecoderClassifier(DecoderEncoder):
    """Qwen3ForSequenceClassification and its like: the last token's vector, then one score for each label.

    As in transformers, it is the last token that is not `pad`, if there is one.
    """

    def __init__(self, decoder: Decoder, size: int, labels: int, dtype: torch.dtype, *, pad: int | None) -> None:
        super().__init__(decoder)
        self._pad = pad
        self.score = Linear(size, labels, bias=False, dtype=dtype)

    def scores(self, hidden: torch.Tensor, packed: Packed) -> torch.Tensor:
        """[tokens, hidden] -> [inputs, labels]."""
        last = packed.last(hidden) if self._pad is None else packed.last_but(hidden, self._pad)
        scores: torch.Tensor = self.score(last)
        return scores
