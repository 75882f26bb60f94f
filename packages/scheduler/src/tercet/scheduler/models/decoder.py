"""The decoder-only language model: what every family here is, given its own layers.

Module names are those of Hugging Face's checkpoints, but for the fused projections (see `FusedLinear.parts`).
"""

from collections.abc import Callable

import torch
from torch import nn

from tercet.scheduler.executor.model_config import ModelConfig
from tercet.scheduler.models.layer_ops import Batch, OpsModule
from tercet.scheduler.models.layers import Attention, Embedding, GatedMLP, Linear, RMSNorm, Rotary
from tercet.scheduler.models.moe import MixtureOfExperts


class DecoderLayer(nn.Module):
    """Attention, then MLP, each on the normalised sum of everything before it."""

    def __init__(self, config: ModelConfig, attention: Attention, mlp: GatedMLP | MixtureOfExperts) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, config.dtype)
        self.self_attn = attention
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, config.dtype)
        self.mlp = mlp

    def forward(
        self, x: torch.Tensor, residual: torch.Tensor | None, positions: torch.Tensor, batch: Batch
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """What the MLP gives, and the sum of everything before it if that is not added yet; all [tokens, hidden]."""
        x, residual = self.self_attn(self.input_layernorm, x, residual, positions, batch)
        added: tuple[torch.Tensor, torch.Tensor | None] = self.mlp(self.post_attention_layernorm, x, residual)
        return added


class Decoder(nn.Module):
    """Embedding, layers and the last norm. `layer` makes the layer of a number."""

    def __init__(self, config: ModelConfig, layer: Callable[[int, Rotary], DecoderLayer]) -> None:
        super().__init__()
        rotary = Rotary(config)
        self.embed_tokens = Embedding(config)
        self.layers = nn.ModuleList(layer(number, rotary) for number in range(config.layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, config.dtype)

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor, batch: Batch) -> torch.Tensor:
        """[tokens] -> [tokens, hidden]."""
        x: torch.Tensor = self.embed_tokens(input_ids)
        residual: torch.Tensor | None = None
        for layer in self.layers:
            x, residual = layer(x, residual, positions, batch)
        hidden: torch.Tensor = self.norm.add(x, residual)[0]
        return hidden


class CausalLM(OpsModule):
    """A decoder and its head. Not for training: run it under `torch.inference_mode`."""

    def __init__(self, config: ModelConfig, layer: Callable[[int, Rotary], DecoderLayer]) -> None:
        super().__init__()
        self.config = config
        self.model = Decoder(config, layer)
        self.lm_head = (
            None
            if config.tie_word_embeddings
            else Linear(config.hidden_size, config.vocab_size, bias=False, dtype=config.dtype)
        )

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor, batch: Batch) -> torch.Tensor:
        """Hidden states [tokens, hidden] of token ids [tokens] at positions [tokens]."""
        hidden: torch.Tensor = self.model(input_ids, positions, batch)
        return hidden

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[rows, hidden] -> [rows, vocab] of the model's dtype."""
        head = self.model.embed_tokens if self.lm_head is None else self.lm_head
        return self.ops.project(hidden, head.weight, None)
