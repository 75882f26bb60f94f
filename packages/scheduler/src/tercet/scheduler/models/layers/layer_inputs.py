"""Inputs that each layer has of its own, beside the hidden state: of the token, and of its embedding."""

from collections.abc import Callable

import torch

from tercet.scheduler.models.config.model_config import ModelConfig
from tercet.scheduler.models.layers.decoder import Decoder, DecoderLayer
from tercet.scheduler.models.layers.encoder_layers import Table
from tercet.scheduler.models.layers.layer_ops import Batch
from tercet.scheduler.models.layers.layers import Rotary
from tercet.scheduler.models.layers.linear import Linear
from tercet.scheduler.models.layers.norms import RMSNorm
from tercet.scheduler.models.layers.parameters import rounded
from tercet.scheduler.models.layers.shard import Shard


class LayerInputDecoder(Decoder):
    """A decoder whose layers get an input of their own, if the config has any. Each rank has all of their weights."""

    def __init__(
        self, config: ModelConfig, shard: Shard, layer: Callable[[int, Rotary], DecoderLayer], norm: type[RMSNorm]
    ) -> None:
        super().__init__(config, shard, layer, norm)
        size, dtype = config.layer_input_size, config.dtype
        self._size, self._padding = size, config.layer_input_padding
        self._scale = rounded(size**0.5, dtype)
        self._root = config.hidden_size**-0.5
        if size:
            self.embed_tokens_per_layer = Table(config.layer_input_vocab, config.layers * size, dtype)
            self.per_layer_model_projection = Linear(config.hidden_size, config.layers * size, bias=False, dtype=dtype)
            self.per_layer_projection_norm = norm(size, config.rms_norm_eps, dtype)

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor, batch: Batch) -> torch.Tensor:
        """Return the hidden states [tokens, hidden] of input ids [tokens]."""
        x: torch.Tensor = self.embed_tokens(input_ids)
        if batch.replaced is not None:
            x = x.index_copy(0, batch.replaced.places, batch.replaced.vectors.to(x.dtype))
            input_ids = input_ids.index_fill(0, batch.replaced.places, self._padding)
        own = self.layer_inputs(input_ids, x) if self._size else [None] * len(self.layers)
        residual: torch.Tensor | None = None
        for layer, each in zip(self.layers, own, strict=True):
            x, residual = layer(x, residual, positions, batch, each)
        hidden: torch.Tensor = self.norm.add(x, residual)[0]
        return hidden

    def layer_inputs(self, input_ids: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return the input [tokens, layer_input_size] of each layer; x are the embeddings."""
        shape = (len(x), len(self.layers), self._size)
        of_tokens = self.embed_tokens_per_layer(input_ids).view(shape) * self._scale
        projected = (self.per_layer_model_projection(x) * self._root).view(shape)
        own: torch.Tensor = (self.per_layer_projection_norm(projected) + of_tokens) * 2**-0.5
        return own.unbind(1)
