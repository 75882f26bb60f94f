"""The decoder-only language model, which every family builds from its own layers.

Module names are those of Hugging Face's checkpoints, except for fused projections (see `FusedLinear.parts`).
"""

from collections.abc import Callable
from itertools import zip_longest
from typing import Literal, NamedTuple, TypeVar

import torch
from torch import nn

from tercet.scheduler.models.config.model_config import ModelConfig
from tercet.scheduler.models.config.recurrent_config import RecurrentConfig
from tercet.scheduler.models.layers.latent_attention import LatentAttention
from tercet.scheduler.models.layers.layer_ops import Batch, OpsModule
from tercet.scheduler.models.layers.layers import (
    Attention,
    GatedMLP,
    Rotary,
    SquaredReLUMLP,
    Unrotated,
    VocabParallelEmbedding,
)
from tercet.scheduler.models.layers.linear import Linear, Matrix
from tercet.scheduler.models.layers.moe import MixtureOfExperts, mlp_of
from tercet.scheduler.models.layers.norms import RMSNorm
from tercet.scheduler.models.layers.recurrent import RecurrentLayer
from tercet.scheduler.models.layers.shard import Cut, Shard

RecurrentT = TypeVar("RecurrentT", bound=RecurrentConfig)


class Norms(NamedTuple):
    """The norms of a layer: of the inputs of attention and MLP, and of their outputs; None for those without one."""

    attention: RMSNorm | None
    mlp: RMSNorm | None
    after_attention: RMSNorm | None = None
    after_mlp: RMSNorm | None = None


class DecoderLayer(nn.Module):
    """Attention or a recurrent layer, then MLP, each on the normalized residual."""

    def __init__(
        self,
        config: ModelConfig,
        mixer: Attention | LatentAttention | RecurrentLayer,
        mlp: GatedMLP | MixtureOfExperts,
        norm: type[RMSNorm] = RMSNorm,
    ) -> None:
        super().__init__()
        self.input_layernorm = norm(config.hidden_size, config.rms_norm_eps, config.dtype)
        self._mixer_name = _name_of(mixer)
        self.add_module(self._mixer_name, mixer)
        self.post_attention_layernorm = norm(config.hidden_size, config.rms_norm_eps, config.dtype)
        self.mlp = mlp

    @property
    def norms(self) -> Norms:
        """The norms of the layer."""
        return Norms(self.input_layernorm, self.post_attention_layernorm)

    def forward(
        self, x: torch.Tensor, residual: torch.Tensor | None, positions: torch.Tensor, batch: Batch
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the MLP's output, and the residual if it is not yet added; all [tokens, hidden]."""
        norms = self.norms
        mixer = getattr(self, self._mixer_name)
        x, residual = mixer(norms.attention, x, residual, positions, batch, norms.after_attention)
        added: tuple[torch.Tensor, torch.Tensor | None] = self.mlp(norms.mlp, x, residual, norms.after_mlp)
        return added


class SingleLayer(nn.Module):
    """Attention, a recurrent layer or an MLP alone, on the normalized residual."""

    def __init__(
        self, config: ModelConfig, mixer: Attention | RecurrentLayer | SquaredReLUMLP | MixtureOfExperts
    ) -> None:
        super().__init__()
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, config.dtype)
        self._is_mlp = isinstance(mixer, SquaredReLUMLP | MixtureOfExperts)
        self._name = "mlp" if self._is_mlp else _name_of(mixer)
        self.add_module(self._name, mixer)

    def forward(
        self, x: torch.Tensor, residual: torch.Tensor | None, positions: torch.Tensor, batch: Batch
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """See `DecoderLayer`."""
        mixer = getattr(self, self._name)
        added: tuple[torch.Tensor, torch.Tensor | None]
        added = mixer(self.norm, x, residual) if self._is_mlp else mixer(self.norm, x, residual, positions, batch)
        return added


class AbsentLayer(nn.Module):
    """A layer of another pipeline stage."""

    def forward(
        self, x: torch.Tensor, residual: torch.Tensor | None, positions: torch.Tensor, batch: Batch
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return x and the residual."""
        del positions, batch
        return x, residual


class Decoder(nn.Module):
    """Embedding, layers and the final norm, or a pipeline stage of them.

    `layer` creates the layer of a number; `norm` is the class of the final norm.
    """

    rotary: Rotary | None
    """The rotation of most layers; None for a model whose positions are embedded."""
    embed_tokens: VocabParallelEmbedding
    """Only in the first pipeline stage, and in the last one if it is the head."""
    norm: RMSNorm
    """Only in the last pipeline stage."""

    def __init__(
        self,
        config: ModelConfig,
        shard: Shard,
        layer: Callable[[int, Rotary], DecoderLayer | SingleLayer],
        norm: type[RMSNorm],
    ) -> None:
        super().__init__()
        if shard.stage.count > 1 and (type(self) is not Decoder or config.shared_caches):
            raise ValueError(f"{config.architecture} runs in one pipeline stage: its layers share inputs or caches")
        if shard.stage.count > 1 and config.recurrent is not None:
            raise ValueError(f"{config.architecture} runs in one pipeline stage: it has recurrent states")
        self.rotary = rotary = Unrotated(config) if len(config.unrotated) == config.layers else Rotary(config)
        self.stage = stage = shard.stage
        self._hidden = config.hidden_size, config.dtype
        if stage.is_first or (stage.is_last and config.tie_word_embeddings):
            self.embed_tokens = VocabParallelEmbedding(config, shard)
        held = stage.layers(config.layers)
        self.layers = nn.ModuleList(
            layer(number, rotary) if number in held else AbsentLayer() for number in range(config.layers)
        )
        if stage.is_last:
            self.norm = norm(config.hidden_size, config.rms_norm_eps, config.dtype)

    def embed(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Return the input [tokens, hidden] of the first layer here: embeddings, or the output of the stage before."""
        if self.stage.is_first:
            embedded: torch.Tensor = self.embed_tokens(input_ids)
            return embedded
        size, dtype = self._hidden
        return self.stage.receive(torch.zeros(len(input_ids), size, dtype=dtype, device=input_ids.device))

    def finish(self, x: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor:
        """Return the normalized output of the last layer; in an earlier stage, send the output to the next one."""
        if self.stage.is_last:
            hidden: torch.Tensor = self.norm.add(x, residual)[0]
            return hidden
        x = x if residual is None else x + residual
        self.stage.send(x.to(self._hidden[1]))
        return x

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor, batch: Batch) -> torch.Tensor:
        """Return the hidden states [tokens, hidden] of input ids [tokens]."""
        x = self.embed(input_ids)
        parts: list[torch.Tensor] = []
        if batch.replaced is not None and self.stage.is_first:
            vectors = batch.replaced.vectors.to(x.dtype)
            first, *parts = vectors.view(len(vectors), -1, x.shape[1]).unbind(1)
            x = x.index_copy(0, batch.replaced.places, first)
        residual: torch.Tensor | None = None
        for layer, part in zip_longest(self.layers, parts):
            x, residual = layer(x, residual, positions, batch)
            if part is not None and batch.replaced is not None:
                x = x.index_add(0, batch.replaced.places, part)
        return self.finish(x, residual)


class CausalLM(OpsModule):
    """A decoder and its head, for inference only: run it under `torch.inference_mode`."""

    def __init__(
        self,
        config: ModelConfig,
        shard: Shard,
        layer: Callable[[int, Rotary], DecoderLayer | SingleLayer],
        norm: type[RMSNorm] = RMSNorm,
        decoder: type[Decoder] = Decoder,
    ) -> None:
        super().__init__()
        self.config = config
        self.shard = shard
        self.model = decoder(config, shard, layer, norm)
        self.lm_head: Linear | None = None
        if shard.stage.is_last and not config.tie_word_embeddings:
            ids = shard.uneven_span(config.vocab_size)
            self.lm_head = Linear(config.hidden_size, len(ids), bias=False, dtype=config.dtype)
            self.lm_head.cuts = {"weight": Cut.span(config.vocab_size, ids)}

    @property
    def head(self) -> Matrix:
        """The output head, which may be the embedding. An earlier pipeline stage has none."""
        return self.model.embed_tokens if self.lm_head is None else self.lm_head

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor, batch: Batch) -> torch.Tensor:
        """Return the hidden states [tokens, hidden] of token ids [tokens] at positions [tokens]."""
        hidden: torch.Tensor = self.model(input_ids, positions, batch)
        return hidden

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return logits [rows, vocab], in the model's dtype, of hidden states [rows, hidden].

        A pipeline stage without a head, which samples only to warm up, returns zeros.
        """
        if not self.shard.stage.is_last:
            return hidden.new_zeros(len(hidden), self.config.vocab_size)
        logits = self.ops.project(hidden, self.head.weight, None)
        return scale_logits(self.shard.gather_columns(logits, self.config.vocab_size), self.config)


def build_decoder(
    config: ModelConfig,
    shard: Shard,
    *,
    qk_norm: Literal["none", "heads", "projections"] = "none",
    sinks: bool = False,
) -> CausalLM:
    """Build the decoder of most families: Llama's, with what the config has. See `Attention` for the options."""

    def layer(number: int, rotary: Rotary) -> DecoderLayer:
        attention = Attention(
            config,
            number,
            rotary,
            shard,
            input_bias=config.attention_bias,
            output_bias=config.output_bias,
            qk_norm=qk_norm,
            sinks=sinks,
        )
        return DecoderLayer(config, attention, mlp_of(config, number, shard))

    return CausalLM(config, shard, layer)


def build_hybrid(
    config: ModelConfig,
    shard: Shard,
    kind: type[RecurrentT],
    recurrent: Callable[[int, RecurrentT, Shard], RecurrentLayer],
    attention: Callable[[int, Rotary], Attention | LatentAttention],
    norm: type[RMSNorm] = RMSNorm,
    attention_layer: type[DecoderLayer] = DecoderLayer,
) -> CausalLM:
    """Build a model of layers that are either recurrent, with a config of a `kind`, or have attention."""
    states = states_of(config, kind)

    def layer(number: int, rotary: Rotary) -> DecoderLayer:
        mlp = mlp_of(config, number, shard)
        if number in states.layers:
            return DecoderLayer(config, recurrent(number, states, shard), mlp, norm)
        return attention_layer(config, attention(number, rotary), mlp, norm)

    return CausalLM(config, shard, layer, norm)


def states_of(config: ModelConfig, kind: type[RecurrentT]) -> RecurrentT:
    """Return the config of recurrent layers, which is of a `kind`."""
    if not isinstance(config.recurrent, kind):
        raise TypeError(f"the config has no {kind.__name__}")
    return config.recurrent


def _name_of(mixer: nn.Module) -> str:
    """Return the name of attention or a recurrent layer in checkpoints."""
    return mixer.name if isinstance(mixer, RecurrentLayer) else "self_attn"


def scale_logits(logits: torch.Tensor, config: ModelConfig) -> torch.Tensor:
    """Apply the config's logit divisor and soft cap in place: cap * tanh(logits / cap)."""
    if config.logit_divisor != 1:
        logits = logits.div_(config.logit_divisor)
    most = config.logit_softcap
    return logits.div_(most).tanh_().mul_(most) if most else logits
