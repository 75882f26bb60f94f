"""The translation of Gemma's config.json to the fields of other families, with transformers' defaults.

Gemma's configs leave out more than others do. Those of models that read images have the text model's fields in an
object of their own.
"""

from collections.abc import Mapping
from typing import Any

from tercet.scheduler.model_files import saved_dtype
from tercet.scheduler.models.config.config_fields import Fields, wrong
from tercet.scheduler.models.config.field_support import honoured_fields

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
_GEMMA3 = _GEMMA2 | {
    "vocab_size": 262_208,
    "max_position_embeddings": 131_072,
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
}
_DEFAULTS: dict[str, dict[str, Any]] = {
    "Gemma2ForCausalLM": _GEMMA2,
    "Gemma3ForCausalLM": _GEMMA3,
    "Gemma3ForConditionalGeneration": _GEMMA3,
}
_ANYWHERE = ("eos_token_id", "tie_word_embeddings", "quantization_config")
"""Fields that may be set for the whole model and then apply to the text model."""
_BASES = {"full_attention": ("rope_theta", 1e6), "sliding_attention": ("rope_local_base_freq", 1e4)}
"""Old field names and defaults of the rotary base, for each type of layer of Gemma 3."""


_NULLS = "_softcapping", "is_causal"
"""Suffixes of fields whose null differs from leaving them out."""
_TANH_GELU = "gelu_pytorch_tanh", "gelu_new", "gelu_fast", "gelu_accurate", "gelu_python_tanh"
"""Names of the same function."""


def is_gemma(architecture: str) -> bool:
    """Return whether `normalize_gemma` supports an architecture."""
    return architecture in _DEFAULTS


def normalize_gemma(config: Mapping[str, Any], architecture: str) -> dict[str, Any]:
    """Return a config in the format of other families; `rope_parameters` are those of full-attention layers.

    If layers with a window rotate differently, their parameters are in `local_rope`, as a config by itself.
    """
    defaults = _DEFAULTS[architecture]
    text = config.get("text_config", config) or {}
    if not isinstance(text, dict):
        raise wrong("text_config", "is not an object")
    text = text if text is config else honoured_fields(text, architecture)
    said = {name: value for name, value in text.items() if value is not None or name.endswith(_NULLS)}
    said |= {name: config[name] for name in _ANYWHERE if config.get(name) is not None}
    plain = defaults | said
    Fields(plain).choice("hidden_activation", _TANH_GELU, _TANH_GELU[0])
    plain.pop("torch_dtype", None)
    plain |= {"dtype": saved_dtype(config), "layer_types": _layer_types(plain, architecture)}
    return plain if architecture == "Gemma2ForCausalLM" else plain | _ropes(plain)


def gemma_fields(plain: Mapping[str, Any], architecture: str) -> dict[str, float]:
    """Return the fields of a `ModelConfig` that are specific to Gemma."""
    fields = Fields(plain)
    caps = {"softcap": "attn_logit_softcapping", "logit_softcap": "final_logit_softcapping"}
    if architecture != "Gemma2ForCausalLM":
        del caps["softcap"]  # transformers does not read it
    return {
        "embedding_scale": fields.count("hidden_size") ** 0.5,
        "attention_scale": fields.number("query_pre_attn_scalar") ** -0.5,
        **{name: fields.number(field) for name, field in caps.items() if fields.has(field)},
    }


def _layer_types(plain: Mapping[str, Any], architecture: str) -> Any:
    """Return the config's layer types; by default every second layer (Gemma 3: every sixth) has full attention."""
    if "layer_types" in plain:
        return plain["layer_types"]
    fields = Fields(plain)
    every = 2 if architecture == "Gemma2ForCausalLM" else fields.count("sliding_window_pattern", 6)
    layers = range(1, fields.layers() + 1)
    return ["sliding_attention" if layer % every else "full_attention" for layer in layers]


def _ropes(plain: Mapping[str, Any]) -> dict[str, Any]:
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
