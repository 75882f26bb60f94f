"""Gemma 3n: several hidden states for each token (AltUp), a learned residual (LAuReL), MLPs with few gates, an input of
each layer, and last layers that read the caches of others.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, cast

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from tercet.scheduler.models.config.altup_config import AltUpConfig, mlp_sizes, parse_altup
from tercet.scheduler.models.config.attention_windows import Windows
from tercet.scheduler.models.config.config_defaults import ConfigDefaults
from tercet.scheduler.models.config.config_fields import Fields
from tercet.scheduler.models.config.field_support import NOT_READ, WINDOWS, field_table
from tercet.scheduler.models.config.model_config import ModelConfig
from tercet.scheduler.models.config.rope_config import parse_rope
from tercet.scheduler.models.families.gemma.gemma import GemmaLayer, cap, ropes_of, shared_caches, with_defaults
from tercet.scheduler.models.family import ModelFamily
from tercet.scheduler.models.layers.decoder import CausalLM, DecoderLayer
from tercet.scheduler.models.layers.layer_inputs import LayerInputDecoder
from tercet.scheduler.models.layers.layer_ops import Batch, OpsModule
from tercet.scheduler.models.layers.layers import Attention, GatedMLP, Rotary
from tercet.scheduler.models.layers.linear import Linear
from tercet.scheduler.models.layers.norms import FloatNorm, RMSNorm
from tercet.scheduler.models.layers.parameters import empty_parameter, rounded
from tercet.scheduler.models.layers.shard import Shard


class AltUp(OpsModule):
    """Alternating updates (Baykal et al., NeurIPS 2023): maps between the hidden states of a token.

    The states are [states, tokens, hidden].
    """

    def __init__(self, config: ModelConfig, altup: AltUpConfig) -> None:
        super().__init__()
        size, states, dtype = config.hidden_size, altup.states, config.dtype
        self.altup = altup
        self.correct_output_scale = empty_parameter(size, dtype=dtype)
        self.correction_coefs = Linear(states, states, bias=False, dtype=dtype)
        self.prediction_coefs = Linear(states, states**2, bias=False, dtype=dtype)
        self.modality_router = Linear(size, states, bias=False, dtype=dtype)
        self.router_norm = FloatNorm(size, config.rms_norm_eps, dtype)
        self._scale = 1 / size

    def predict(self, states: torch.Tensor) -> torch.Tensor:
        """Return the states that are expected after a layer."""
        count = self.altup.states
        coefficients: torch.Tensor = self.prediction_coefs(self._routed(states[self.altup.active]))
        coefficients = coefficients.view(-1, count, count)
        return (states.permute(1, 2, 0) @ coefficients.mT).permute(2, 0, 1).contiguous() + states

    def correct(self, predicted: torch.Tensor, computed: torch.Tensor) -> torch.Tensor:
        """Return the predicted states, corrected by the error of the active one, which a layer has computed."""
        coefficients: torch.Tensor = self.correction_coefs(self._routed(computed)) + 1.0
        return (computed - predicted[self.altup.active]) * coefficients.T[..., None] + predicted

    def scaled(self, state: torch.Tensor) -> torch.Tensor:
        """Return a corrected state in the scale of the layer's own input."""
        return state * self.correct_output_scale if self.altup.scales_correction else state

    def _routed(self, state: torch.Tensor) -> torch.Tensor:
        routed: torch.Tensor = self.modality_router(self.router_norm(state) * self._scale)
        return routed.float().tanh().to(state.dtype)


class Laurel(nn.Module):
    """A learned residual of low rank (arXiv 2411.07501)."""

    def __init__(self, config: ModelConfig, rank: int) -> None:
        super().__init__()
        size, dtype = config.hidden_size, config.dtype
        self.linear_left = Linear(size, rank, bias=False, dtype=dtype)
        self.linear_right = Linear(rank, size, bias=False, dtype=dtype)
        self.post_laurel_norm = FloatNorm(size, config.rms_norm_eps, dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return x [tokens, hidden] and its learned residual."""
        normed: torch.Tensor = self.post_laurel_norm(self.linear_right(self.linear_left(x)))
        return x + normed


class SparseMLP(GatedMLP):
    """A gated MLP in which about a share `sparsity` of a token's gates, the lowest, are cut to zero.

    Gates are taken as normally distributed (Gaussian top-k); their mean and deviation are those over all ranks.
    """

    def __init__(self, config: ModelConfig, shard: Shard, size: int, sparsity: float) -> None:
        super().__init__(config, shard, size=size, gate="gelu_tanh")
        self._shard, self._size = shard, size
        quantile = torch.erfinv(2 * torch.tensor(sparsity, device="cpu") - 1) * 2**0.5
        self._quantile = float(quantile.to(config.dtype))

    def forward(
        self, norm: RMSNorm | None, x: torch.Tensor, residual: torch.Tensor | None, after: RMSNorm | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """See `GatedMLP`."""
        projected, residual = self.gate_up_proj.project_normed(norm, x, residual)
        gate, up = projected.chunk(2, 1)
        gate = F.relu(gate - self._cutoff(gate))
        return self.down_proj.project_onto(F.gelu(gate, approximate="tanh") * up, residual, after)

    def _cutoff(self, gate: torch.Tensor) -> torch.Tensor:
        """Return the gate [tokens, 1] above which a token's gates count."""
        if self._shard.size == 1:
            return gate.mean(1, keepdim=True) + gate.std(1, keepdim=True, unbiased=False) * self._quantile
        reduce, values = self._shard.collectives.all_reduce, gate.float()
        mean = reduce(values.sum(1, keepdim=True)) / self._size
        variance = reduce((values - mean).square().sum(1, keepdim=True)) / self._size
        return (mean + variance.sqrt() * self._quantile).to(gate.dtype)


class Gemma3nLayer(GemmaLayer):
    """A layer of Gemma that computes with one of several states, which it predicts before and corrects after."""

    self_attn: Attention
    mlp: GatedMLP

    def __init__(self, config: ModelConfig, altup: AltUpConfig, attention: Attention, mlp: GatedMLP) -> None:
        super().__init__(config, attention, mlp, FloatNorm)
        size, own, eps, dtype = config.hidden_size, config.layer_input_size, config.rms_norm_eps, config.dtype
        self.altup = AltUp(config, altup)
        self.laurel = Laurel(config, altup.laurel_rank)
        self.per_layer_input_gate = Linear(size, own, bias=False, dtype=dtype)
        self.per_layer_projection = Linear(own, size, bias=False, dtype=dtype)
        self.post_per_layer_input_norm = FloatNorm(size, eps, dtype)
        self._active = altup.active

    def forward(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        positions: torch.Tensor,
        batch: Batch,
        own: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the states [states, tokens, hidden]; `own` [tokens, layer_input_size] is the layer's own input."""
        if own is None:
            raise TypeError("each layer has an input of its own")
        predicted = self.altup.predict(x)
        active = predicted[self._active]
        normed = self.input_layernorm(active)
        attended, _ = self.self_attn(None, normed, None, positions, batch, self.post_attention_layernorm)
        attended = (active + attended + self.laurel(normed)) * 0.5**0.5
        out, _ = self.mlp(self.pre_feedforward_layernorm, attended, None, self.post_feedforward_layernorm)
        corrected = self.altup.correct(predicted, attended + out)
        gated = F.gelu(self.per_layer_input_gate(self.altup.scaled(corrected[self._active])), approximate="tanh")
        added = self.post_per_layer_input_norm(self.per_layer_projection(gated * own))
        return torch.cat([corrected[:1], corrected[1:] + added]), residual


class Gemma3nDecoder(LayerInputDecoder):
    """A decoder whose layers share several states of each token, projected from its embedding."""

    def __init__(
        self, config: ModelConfig, shard: Shard, layer: Callable[[int, Rotary], DecoderLayer], norm: type[RMSNorm]
    ) -> None:
        super().__init__(config, shard, layer, norm)
        size, more = config.hidden_size, cast("AltUpConfig", config.altup).states - 1
        self.altup_projections, self.altup_unembed_projections = (
            nn.ModuleList(Linear(size, size, bias=False, dtype=config.dtype) for _ in range(more)) for _ in range(2)
        )
        self._vocab = config.layer_input_vocab

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor, batch: Batch) -> torch.Tensor:
        """Return the hidden states [tokens, hidden] of input ids [tokens]."""
        embedded: torch.Tensor = self.embed_tokens(input_ids)
        others = (_as_large(projection(embedded), embedded) for projection in self.altup_projections)
        states = torch.stack([embedded, *others])
        known = torch.where(input_ids < self._vocab, input_ids, 0)  # others have the input of token 0
        for layer, own in zip(self.layers, self.layer_inputs(known, embedded), strict=True):
            states, _ = layer(states, None, positions, batch, own)
        first, *rest = states.unbind(0)
        back = (
            _as_large(projection(state), first)
            for projection, state in zip(self.altup_unembed_projections, rest, strict=True)
        )
        hidden: torch.Tensor = self.norm(torch.stack([first, *back]).mean(0))
        return hidden


def _as_large(x: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Scale vectors [tokens, hidden] to the root mean squares of others."""
    wanted = like.square().mean(-1, keepdim=True) ** 0.5
    return x * wanted / x.square().mean(-1, keepdim=True).clamp(min=1e-5).sqrt()


def build(config: ModelConfig, shard: Shard) -> CausalLM:
    """Build Gemma3nForCausalLM."""
    config = replace(config, embedding_scale=rounded(config.embedding_scale, config.dtype))
    altup, local = cast("AltUpConfig", config.altup), Rotary(config, config.local_rope)

    def layer(number: int, rotary: Rotary) -> DecoderLayer:
        attention = Attention(
            config,
            number,
            local if config.window_of(number) else rotary,
            shard,
            input_bias=config.attention_bias,
            output_bias=config.output_bias,
            qk_norm="heads",
            norm=FloatNorm,
            value_norm=True,
        )
        size, sparsity = altup.mlp_sizes[number], altup.sparsity[number]
        mlp = (
            SparseMLP(config, shard, size, sparsity)
            if sparsity
            else GatedMLP(config, shard, size=size, gate="gelu_tanh")
        )
        return Gemma3nLayer(config, altup, attention, mlp)

    return CausalLM(config, shard, layer, FloatNorm, Gemma3nDecoder)


_DEFAULTS = {
    "vocab_size": 262_400,
    "hidden_size": 2048,
    "intermediate_size": 16_384,
    "num_hidden_layers": 35,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "max_position_embeddings": 32_768,
    "sliding_window": 512,
    "eos_token_id": 1,
    "tie_word_embeddings": True,
    "final_logit_softcapping": 30.0,
    "hidden_size_per_layer_input": 256,
    "vocab_size_per_layer_input": 262_144,
}
"""transformers' defaults."""


def _normalize(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config in the format of other families; `mlp_sizes` has what may be a list."""
    plain = with_defaults(config, _DEFAULTS, lambda _: 5)
    sizes = plain["intermediate_size"]
    widest = max(mlp_sizes(sizes, Fields(plain).layers()))
    return plain | ropes_of(plain) | {"mlp_sizes": sizes, "intermediate_size": widest}


def _adapt(config: ModelConfig, fields: Fields) -> ModelConfig:
    return replace(
        config,
        local_rope=parse_rope(fields.values["local_rope"], ConfigDefaults()),
        embedding_scale=config.hidden_size**0.5,
        attention_scale=1.0,
        logit_softcap=cap(fields, "final_logit_softcapping"),
        shared_caches=shared_caches(config, fields, 15),
        layer_input_size=fields.count("hidden_size_per_layer_input"),
        layer_input_vocab=fields.count("vocab_size_per_layer_input"),
        altup=parse_altup(fields, config.layers),
    )


FAMILIES = (
    ModelFamily(
        architectures=("Gemma3nForCausalLM",),
        build=build,
        fields=field_table(
            WINDOWS
            + "activation_sparsity_pattern altup_active_idx altup_correct_scale altup_num_inputs attention_bias "
            "final_logit_softcapping hidden_activation hidden_size_per_layer_input laurel_rank num_kv_shared_layers "
            "rope_local_base_freq vocab_size_per_layer_input",
            without_effect={"hidden_act": NOT_READ, "altup_coef_clip": "of training"},
        ),
        windows=Windows(usual=512, pattern=lambda _, layers: [True] * layers),
        normalize=_normalize,
        adapt=_adapt,
        not_native="native kernels have one hidden state for each token",
    ),
)
