"""Gemma 2 and 3, and the text model of Gemma 3 with images: norms before and after attention and MLP."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, Literal

from tercet.scheduler.models.config.attention_windows import Windows, every_second_layer
from tercet.scheduler.models.config.config_defaults import ConfigDefaults
from tercet.scheduler.models.config.config_fields import Fields, wrong
from tercet.scheduler.models.config.field_support import (
    NOT_READ,
    WINDOWS,
    Refused,
    field_table,
)
from tercet.scheduler.models.config.model_config import ModelConfig
from tercet.scheduler.models.config.rope_config import parse_rope
from tercet.scheduler.models.family import ModelFamily
from tercet.scheduler.models.layers.decoder import CausalLM, DecoderLayer, Norms
from tercet.scheduler.models.layers.layers import Attention, GatedMLP, Rotary
from tercet.scheduler.models.layers.moe import MixtureOfExperts
from tercet.scheduler.models.layers.norms import CenteredNorm, RMSNorm
from tercet.scheduler.models.layers.parameters import rounded
from tercet.scheduler.models.layers.shard import Shard
from tercet.scheduler.models.vision import gemma3


class GemmaLayer(DecoderLayer):
    """Attention, then MLP, each on the normalized residual, with normalized outputs."""

    def __init__(
        self,
        config: ModelConfig,
        attention: Attention,
        mlp: GatedMLP | MixtureOfExperts,
        norm: type[RMSNorm] = CenteredNorm,
    ) -> None:
        super().__init__(config, attention, mlp, norm)
        self.pre_feedforward_layernorm = norm(config.hidden_size, config.rms_norm_eps, config.dtype)
        self.post_feedforward_layernorm = norm(config.hidden_size, config.rms_norm_eps, config.dtype)

    @property
    def norms(self) -> Norms:
        """The norms. In checkpoints, the norm after attention has the name that other families give to the one
        before the MLP.
        """
        return Norms(
            self.input_layernorm,
            self.pre_feedforward_layernorm,
            self.post_attention_layernorm,
            self.post_feedforward_layernorm,
        )


def build(config: ModelConfig, shard: Shard, qk_norm: Literal["none", "heads"] = "heads") -> CausalLM:
    """Build Gemma2ForCausalLM or Gemma3ForCausalLM."""
    config = replace(config, embedding_scale=rounded(config.embedding_scale, config.dtype))
    local = None if config.local_rope is None else Rotary(config, config.local_rope)

    def layer(number: int, rotary: Rotary) -> DecoderLayer:
        attention = Attention(
            config,
            number,
            local if local is not None and config.window_of(number) else rotary,
            shard,
            input_bias=config.attention_bias,
            output_bias=config.output_bias,
            qk_norm=qk_norm,
            norm=CenteredNorm,
        )
        return GemmaLayer(config, attention, GatedMLP(config, shard, gate="gelu_tanh"))

    return CausalLM(config, shard, layer, CenteredNorm)


_GEMMA2 = {
    "vocab_size": 256_000,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 8192,
    "sliding_window": 4096,
    "query_pre_attn_scalar": 256,
    "eos_token_id": 1,
    "tie_word_embeddings": True,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
}
"""transformers' defaults. Gemma's configs leave out more than others do."""
_GEMMA3 = _GEMMA2 | {
    "vocab_size": 262_208,
    "max_position_embeddings": 131_072,
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
}
_FIELDS = (
    WINDOWS + "attention_bias hidden_activation final_logit_softcapping query_pre_attn_scalar "
    "sliding_window_pattern rope_local_base_freq "
)
_REFUSED = {
    "use_bidirectional_attention": Refused((False,), "attention to following tokens is not supported for Gemma")
}
_GEMMA2_FIELDS = field_table(
    _FIELDS + "attn_logit_softcapping", without_effect={"hidden_act": NOT_READ}, refused=_REFUSED
)
_GEMMA3_FIELDS = field_table(
    _FIELDS,
    without_effect={"hidden_act": NOT_READ, "attn_logit_softcapping": NOT_READ},
    refused=_REFUSED,
)
_BASES = {"full_attention": ("rope_theta", 1e6), "sliding_attention": ("rope_local_base_freq", 1e4)}
"""Old field names and defaults of the rotary base, for each type of layer of Gemma 3."""
_NULLS = "_softcapping", "is_causal"
"""Suffixes of fields whose null differs from leaving them out."""
TANH_GELU = "gelu_pytorch_tanh", "gelu_new", "gelu_fast", "gelu_accurate", "gelu_python_tanh"
"""Names of the same function."""


def _normalize_gemma2(config: Mapping[str, Any]) -> dict[str, Any]:
    return with_defaults(config, _GEMMA2, lambda _: 2)


def _normalize_gemma3(config: Mapping[str, Any]) -> dict[str, Any]:
    """Do the same, with `rope_parameters` of full-attention layers.

    Those of layers with a window are in `local_rope`, as a config by itself.
    """
    plain = with_defaults(config, _GEMMA3, lambda fields: fields.count("sliding_window_pattern", 6))
    return plain | ropes_of(plain)


def with_defaults(
    config: Mapping[str, Any], defaults: Mapping[str, Any], every: Callable[[Fields], int]
) -> dict[str, Any]:
    """Return the config in the format of other families. By default, every `every`th layer has full attention."""
    said = {name: value for name, value in config.items() if value is not None or name.endswith(_NULLS)}
    plain = {**defaults, **said}
    fields = Fields(plain)
    fields.choice("hidden_activation", TANH_GELU, TANH_GELU[0])
    if "layer_types" not in plain:
        full = every(fields)
        layers = range(1, fields.layers() + 1)
        plain["layer_types"] = ["sliding_attention" if layer % full else "full_attention" for layer in layers]
    return plain


def ropes_of(plain: Mapping[str, Any]) -> dict[str, Any]:
    """Return `rope_parameters` of Gemma 3's full-attention layers, and `local_rope` of those with a window."""
    said = plain.get("rope_parameters", {})
    if not isinstance(said, dict) or said.keys() - _BASES.keys():
        raise wrong("rope_parameters", f"must say of {' and '.join(_BASES)} how they rotate")
    if plain.get("rope_scaling"):  # the older format, which applies to full attention only
        said = said | {"full_attention": plain["rope_scaling"]}
    ropes: dict[str, Any] = {}
    for kind, (name, theta) in _BASES.items():
        rope = said.get(kind) or {"rope_type": "default"}
        if not isinstance(rope, dict):
            raise wrong(f"rope_parameters.{kind}", "is not an object")
        ropes[kind] = {"rope_theta": plain.get(name, theta)} | rope
    length = plain["max_position_embeddings"]
    local = {"max_position_embeddings": length, "rope_parameters": ropes["sliding_attention"]}
    return {"rope_scaling": None, "rope_parameters": ropes["full_attention"], "local_rope": local}


def _adapt(config: ModelConfig, fields: Fields) -> ModelConfig:
    local = fields.values.get("local_rope")
    return replace(
        config,
        local_rope=None if local is None else parse_rope(local, ConfigDefaults()),
        embedding_scale=config.hidden_size**0.5,
        attention_scale=fields.number("query_pre_attn_scalar") ** -0.5,
        softcap=cap(fields, "attn_logit_softcapping"),
        logit_softcap=cap(fields, "final_logit_softcapping"),
    )


def shared_caches(config: ModelConfig, fields: Fields, usual: int = 0) -> dict[int, int]:
    """Return the last layers, `usual` by default, and for each the last layer of its kind before them all."""
    first = config.layers - fields.count("num_kv_shared_layers", usual, least=0)
    kinds = [bool(config.window_of(layer)) for layer in range(config.layers)]
    if first < 1 or {*kinds[:first]} != {*kinds}:
        raise wrong("num_kv_shared_layers", f"leaves no layer of some kind before layer {first}")
    return {
        layer: max(other for other in range(first) if kinds[other] == kinds[layer])
        for layer in range(first, config.layers)
    }


def cap(fields: Fields, name: str) -> float:
    return fields.number(name) if fields.has(name) else 0.0


_WINDOWS = Windows(usual=4096, pattern=every_second_layer)  # `with_defaults` has set `layer_types`
FAMILIES = (
    ModelFamily(
        architectures=("Gemma2ForCausalLM",),
        build=partial(build, qk_norm="none"),
        fields=_GEMMA2_FIELDS,
        windows=_WINDOWS,
        normalize=_normalize_gemma2,
        adapt=_adapt,
    ),
    ModelFamily(
        architectures=("Gemma3ForCausalLM",),
        build=build,
        fields=_GEMMA3_FIELDS,
        windows=_WINDOWS,
        normalize=_normalize_gemma3,
        images=gemma3.image_model,
        adapt=_adapt,
    ),
)
