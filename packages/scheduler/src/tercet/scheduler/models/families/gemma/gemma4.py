"""Gemma 4: layers with full attention have other heads than those with a window, and the last ones read their caches.

Small models have an input of each layer beside the hidden state; one has experts beside each MLP.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812

from tercet.kernels.ops.moe import Routing
from tercet.scheduler.models.config.attention_windows import Windows
from tercet.scheduler.models.config.config_defaults import ConfigDefaults
from tercet.scheduler.models.config.config_fields import Fields, wrong
from tercet.scheduler.models.config.field_support import NOT_READ, WINDOWS, Refused, field_table
from tercet.scheduler.models.config.model_config import HeadShape, ModelConfig
from tercet.scheduler.models.config.moe_config import MoeConfig
from tercet.scheduler.models.config.rope_config import parse_rope
from tercet.scheduler.models.families.gemma.gemma import TANH_GELU, GemmaLayer, shared_caches
from tercet.scheduler.models.family import ModelFamily
from tercet.scheduler.models.layers.decoder import CausalLM, DecoderLayer
from tercet.scheduler.models.layers.layer_inputs import LayerInputDecoder
from tercet.scheduler.models.layers.layer_ops import Batch
from tercet.scheduler.models.layers.layers import Attention, GatedMLP, Rotary
from tercet.scheduler.models.layers.linear import Linear
from tercet.scheduler.models.layers.moe import MixtureOfExperts
from tercet.scheduler.models.layers.norms import FloatNorm, RMSNorm, WeightlessNorm
from tercet.scheduler.models.layers.parameters import empty_parameter, rounded
from tercet.scheduler.models.layers.shard import Shard
from tercet.scheduler.models.vision import wrappers


class Gemma4Mixture(MixtureOfExperts):
    """Experts beside an MLP (`shared_experts`), each with norms of its own, over the same residual."""

    def __init__(self, config: ModelConfig, moe: MoeConfig, shard: Shard, layer: int, width: int) -> None:
        """Create both; `width` is the intermediate size of the MLP, of which each rank has columns."""
        super().__init__(config, moe, shard, layer)
        self._reduce = shard.collectives.all_reduce
        self.shared_experts = GatedMLP(config, shard, bias=config.mlp_bias, size=width, gate=moe.gate or "gelu_tanh")
        size, eps, dtype = config.hidden_size, config.rms_norm_eps, config.dtype
        self.gate_norm = WeightlessNorm(size, eps, dtype)
        self.gate_scale = empty_parameter(size, dtype=dtype)
        self.expert_scale = empty_parameter(moe.experts, dtype=dtype)
        self.shared_norm, self.experts_norm, self.experts_input_norm = (FloatNorm(size, eps, dtype) for _ in range(3))
        self._root = size**-0.5

    def forward(
        self, norm: RMSNorm, x: torch.Tensor, residual: torch.Tensor | None, after: RMSNorm | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Apply both to the normalized x + residual. See `Attention.forward`."""
        if self.shared_experts is None:
            raise TypeError("there is an MLP beside the experts")
        x, residual = norm.add(x, residual)
        shared = self.shared_norm(self._reduce(self.shared_experts.partial(x)))
        out = self.tokens.whole(self.mixed(self.tokens.own(residual)), len(x))
        out = shared + self.experts_norm(out)
        return out if after is None else after(out), residual

    def routed(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """See `MixtureOfExperts`. Tokens are residuals, which router and experts read through norms of their own."""
        logits = self.gate(self.gate_norm(x) * self.gate_scale * self._root)
        weights, experts = self.ops.route(logits, self.routing, None)
        return self.experts_input_norm(x), weights * self.expert_scale[experts].to(weights.dtype), experts


class Gemma4Layer(GemmaLayer):
    """A layer of Gemma, then the layer's own input."""

    def __init__(self, config: ModelConfig, attention: Attention, mlp: GatedMLP | Gemma4Mixture) -> None:
        super().__init__(config, attention, mlp, FloatNorm)
        size, own, eps, dtype = config.hidden_size, config.layer_input_size, config.rms_norm_eps, config.dtype
        self.layer_scalar = empty_parameter(1, dtype=dtype)
        self.per_layer_input_gate: Linear | None = None
        if own:
            self.per_layer_input_gate = Linear(size, own, bias=False, dtype=dtype)
            self.per_layer_projection = Linear(own, size, bias=False, dtype=dtype)
            self.post_per_layer_input_norm = FloatNorm(size, eps, dtype)

    def forward(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        positions: torch.Tensor,
        batch: Batch,
        own: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, None]:
        """Return the hidden states; `own` [tokens, layer_input_size] is the layer's own input."""
        x, residual = super().forward(x, residual, positions, batch)
        x = x if residual is None else x + residual
        if self.per_layer_input_gate is not None and own is not None:
            gated = F.gelu(self.per_layer_input_gate(x), approximate="tanh") * own
            x = x + self.post_per_layer_input_norm(self.per_layer_projection(gated))
        return x * self.layer_scalar, None


def build(config: ModelConfig, shard: Shard) -> CausalLM:
    """Build Gemma4ForCausalLM."""
    config = replace(config, embedding_scale=rounded(config.embedding_scale, config.dtype))
    full = next((layer for layer in range(config.layers) if not config.window_of(layer)), 0)
    rotary = Rotary(config, head_dim=config.heads_of(full).head_dim)
    local = Rotary(config, config.local_rope)

    def layer(number: int, _: Rotary) -> DecoderLayer:
        window = config.window_of(number)
        attention = Attention(
            config,
            number,
            local if window else rotary,
            shard,
            input_bias=config.attention_bias,
            output_bias=config.output_bias,
            qk_norm="heads",
            norm=FloatNorm,
            value_norm=True,
            keys_as_values=config.keys_as_values and not window,
        )
        width = config.intermediate_size * (2 if config.wide_sharing_mlps and number in config.shared_caches else 1)
        if config.moe is None:
            return Gemma4Layer(config, attention, GatedMLP(config, shard, size=width, gate="gelu_tanh"))
        return Gemma4Layer(config, attention, Gemma4Mixture(config, config.moe, shard, number, width))

    return CausalLM(config, shard, layer, FloatNorm, LayerInputDecoder)


_DEFAULTS = {
    "vocab_size": 262_144,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 30,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 131_072,
    "sliding_window": 512,
    "eos_token_id": 1,
    "tie_word_embeddings": True,
    "hidden_size_per_layer_input": 256,
    "vocab_size_per_layer_input": 262_144,
}
"""transformers' defaults."""
_ROPES = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
}


def _normalize(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config with defaults, types of layers, and rotations in the format of other families.

    `rope_parameters` is that of layers with full attention, and `local_rope` that of the others.
    """
    plain = {**_DEFAULTS, **{name: value for name, value in config.items() if value is not None}}
    if "rope_scaling" in plain:
        raise wrong("rope_scaling", "rope_parameters must say how each type of layer rotates")
    fields = Fields(plain)
    fields.choice("hidden_activation", TANH_GELU, TANH_GELU[0])
    layers = fields.layers()
    kinds = plain.get("layer_types") or [
        "sliding_attention" if layer % 6 else "full_attention" for layer in range(1, layers + 1)
    ]
    if not isinstance(kinds, list):
        raise wrong("layer_types", "is not a list")
    plain["layer_types"] = [*kinds[:-1], "full_attention"]
    ropes = plain.get("rope_parameters", _ROPES)
    if not isinstance(ropes, Mapping) or any(not isinstance(ropes.get(kind), Mapping) for kind in _ROPES):
        raise wrong("rope_parameters", f"must say of {' and '.join(_ROPES)} how they rotate")
    full = dict(ropes["full_attention"])
    if full.get("rope_type") == "proportional":
        plain["rope_proportion"] = Fields(full, "rope_parameters.").number("partial_rotary_factor", 1.0)
        theta = Fields(full, "rope_parameters.full_attention.").number("rope_theta")
        full = {"rope_theta": theta, "rope_type": "linear", "factor": full.get("factor") or 1.0}
    local = {"max_position_embeddings": plain["max_position_embeddings"], "rope_parameters": ropes["sliding_attention"]}
    return {**plain, "rope_parameters": full, "local_rope": local}


def _adapt(config: ModelConfig, fields: Fields) -> ModelConfig:
    own_vocab = fields.count("vocab_size_per_layer_input")
    if fields.count("hidden_size_per_layer_input", least=0) and own_vocab < config.vocab_size:
        raise wrong("vocab_size_per_layer_input", f"{own_vocab} is less than the vocabulary of {config.vocab_size}")
    return replace(
        config,
        local_rope=parse_rope(fields.values["local_rope"], ConfigDefaults()),
        rope=replace(config.rope, proportion=fields.number("rope_proportion", 1.0)),
        embedding_scale=config.hidden_size**0.5,
        attention_scale=1.0,
        logit_softcap=fields.number("final_logit_softcapping") if fields.has("final_logit_softcapping") else 0.0,
        own_heads=_own_heads(config, fields),
        shared_caches=shared_caches(config, fields),
        keys_as_values=fields.flag("attention_k_eq_v"),
        wide_sharing_mlps=fields.flag("use_double_wide_mlp"),
        layer_input_size=fields.count("hidden_size_per_layer_input", least=0),
        layer_input_vocab=own_vocab,
        layer_input_padding=fields.count("pad_token_id", 0, least=0),
        moe=_experts(config, fields) if fields.flag("enable_moe_block") else None,
    )


def _own_heads(config: ModelConfig, fields: Fields) -> dict[int, HeadShape]:
    """Return the heads of layers with full attention, or those of the layers in `per_layer_config`."""
    own = fields.values.get("per_layer_config")
    if own is None:
        size = {"head_dim": fields.count("global_head_dim", 512)}
        if fields.flag("attention_k_eq_v") and fields.has("num_global_key_value_heads"):
            size["num_key_value_heads"] = fields.count("num_global_key_value_heads")
        own = {str(layer): size for layer in range(config.layers) if not config.window_of(layer)}
    if not isinstance(own, Mapping) or any(not isinstance(each, Mapping) for each in own.values()):
        raise wrong("per_layer_config", "is not an object of objects")
    found: dict[int, HeadShape] = {}
    for layer, each in own.items():
        if strange := each.keys() - {"head_dim", "num_key_value_heads"}:
            raise wrong(f"per_layer_config.{layer}.{min(strange)}", "layers may differ in their heads only")
        if not layer.isdecimal() or int(layer) >= config.layers or config.window_of(int(layer)):
            raise wrong(f"per_layer_config.{layer}", "only layers with full attention may differ")
        shape = Fields(each, f"per_layer_config.{layer}.")
        size_of = shape.count("head_dim", config.head_dim)
        found[int(layer)] = HeadShape(shape.count("num_key_value_heads", config.kv_heads), size_of, size_of)
        if config.heads % found[int(layer)].kv_heads or size_of % 2:
            raise wrong(f"per_layer_config.{layer}", f"its heads do not fit {config.heads} attention heads")
    if len({*found.values()}) > 1:
        raise wrong("per_layer_config", "layers with full attention have one shape")
    return found


def _experts(config: ModelConfig, fields: Fields) -> MoeConfig:
    experts, top_k = fields.count("num_experts"), fields.count("top_k_experts")
    if top_k > experts:
        raise wrong("top_k_experts", f"{top_k} is more than the {experts} experts")
    return MoeConfig(
        experts=experts,
        routing=Routing(top_k=top_k, renormalize=True),
        intermediate_size=fields.count("moe_intermediate_size"),
        shared_size=config.intermediate_size,
        layers=(True,) * config.layers,
        gate="gelu_tanh",
        gates_shared=False,
    )


FAMILIES = (
    ModelFamily(
        architectures=("Gemma4ForCausalLM",),
        build=build,
        fields=field_table(
            WINDOWS + "attention_bias attention_k_eq_v enable_moe_block final_logit_softcapping global_head_dim "
            "hidden_activation hidden_size_per_layer_input moe_intermediate_size num_experts "
            "num_global_key_value_heads num_kv_shared_layers pad_token_id per_layer_config top_k_experts "
            "use_double_wide_mlp vocab_size_per_layer_input",
            without_effect={"hidden_act": NOT_READ},
            refused={
                "use_bidirectional_attention": Refused(
                    (False, "vision"), "attention to following tokens is not supported for Gemma"
                )
            },
        ),
        windows=Windows(usual=512, pattern=lambda _, layers: [True] * layers),
        normalize=_normalize,
        adapt=_adapt,
        images=wrappers.image_model,
        not_native="native kernels normalize no values",
    ),
)
