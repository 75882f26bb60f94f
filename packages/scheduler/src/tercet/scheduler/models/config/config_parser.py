"""The parser of a model's config.json: no code of a model directory ever runs.

It reads both formats: the older one (`rope_theta`, `rope_scaling`, `torch_dtype`) and that of transformers 5
(`rope_parameters`, flat or by layer type, `dtype`). Defaults are those of transformers.
"""

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from tercet.scheduler.architectures import named_architecture
from tercet.scheduler.model_files import ModelError
from tercet.scheduler.models.config.attention_windows import windows_of
from tercet.scheduler.models.config.config_defaults import ConfigDefaults
from tercet.scheduler.models.config.config_fields import Fields, wrong
from tercet.scheduler.models.config.family_config import FamilyConfig
from tercet.scheduler.models.config.field_support import honoured_fields, support_of
from tercet.scheduler.models.config.latent_config import LatentDefaults, is_interleaved, latent_fields, parse_latent
from tercet.scheduler.models.config.model_config import ModelConfig, end_ids, saved_torch_dtype
from tercet.scheduler.models.config.moe_config import parse_moe
from tercet.scheduler.models.config.quantized_config import parse_quantization
from tercet.scheduler.models.config.rope_config import check_rotation, context_length_of, parse_rope

_FIELD = re.compile(r"config\.json: (\w+): ")
"""Beginning of the error of a field."""


def parse_family_config(
    family: FamilyConfig, config: Mapping[str, Any], generation: Mapping[str, Any], dtype: str
) -> ModelConfig:
    """Parse the contents of config.json and generation_config.json. Raise ModelError."""
    try:
        return _parse(family, config, generation, dtype)
    except ModelError as error:
        raise _with_name_in_file(error, family, config) from None


def _with_name_in_file(error: ModelError, family: FamilyConfig, config: Mapping[str, Any]) -> ModelError:
    """Return the error of a field under the name that it has in the file."""
    found = _FIELD.match(str(error))
    if found is None or found[1] in config:
        return error
    called = [name for name, field in family.fields.aliases.items() if field == found[1] and name in config]
    return ModelError(f"config.json: {called[0]}: {str(error)[found.end() :]}") if called else error


def _parse(family: FamilyConfig, config: Mapping[str, Any], generation: Mapping[str, Any], dtype: str) -> ModelConfig:
    architecture = named_architecture(config)
    config = honoured_fields(config, family.fields)
    config = config if family.normalize is None else family.normalize(config)
    fields = Fields(config)
    fields.choice("hidden_act", ("silu", "swish"), "silu")
    heads = fields.count("num_attention_heads")
    hidden_size = fields.count("hidden_size")
    layers = fields.layers()
    defaults = family.defaults
    typed = support_of("layer_types", family.fields) == "honoured"
    rope = parse_rope(config, defaults, by_layer_types=typed)
    # an explicit null does not mean the family's default
    usual_head = None if "head_dim" in config else defaults.head_dim
    result = ModelConfig(
        architecture=architecture,
        hidden_size=hidden_size,
        intermediate_size=fields.count("intermediate_size"),
        layers=layers,
        heads=heads,
        kv_heads=fields.count("num_key_value_heads", heads),
        head_dim=fields.count("head_dim", usual_head or hidden_size // heads),
        vocab_size=fields.count("vocab_size"),
        context_length=context_length_of(fields, rope.scaling),
        rms_norm_eps=fields.number("rms_norm_eps", defaults.rms_norm_eps),
        rope=rope,
        tie_word_embeddings=fields.flag("tie_word_embeddings", defaults.tied),
        attention_bias=_has_bias(fields, defaults),
        mlp_bias=fields.flag(defaults.mlp_bias),
        output_bias=_has_output_bias(fields, defaults),
        norms_heads=fields.flag("use_qk_norm"),
        mtp_layers=fields.count("num_nextn_predict_layers", defaults.mtp_layers, least=0),
        causal=fields.flag("is_causal", True),
        windows=windows_of(fields, family.windows, layers),
        eos_token_ids=end_ids(config, generation),
        dtype=saved_torch_dtype(config, dtype),
        quantization=parse_quantization(config),
        moe=parse_moe(fields, family.moe, layers),
    )
    result = result if family.adapt is None else family.adapt(result, fields)
    result = result if family.latent is None else _with_latent(result, family.latent, fields)
    if heads % result.kv_heads:
        raise wrong("num_key_value_heads", f"{result.kv_heads} does not divide the {heads} attention heads")
    check_rotation(rope, result.rotated_head_dim)
    return result


def _has_bias(fields: Fields, defaults: ConfigDefaults) -> bool:
    return defaults.attention_bias is None or fields.flag(*defaults.attention_bias)


def _has_output_bias(fields: Fields, defaults: ConfigDefaults) -> bool:
    if defaults.output_bias == "":
        return _has_bias(fields, defaults)
    return defaults.output_bias is not None and fields.flag(defaults.output_bias)


def _with_latent(config: ModelConfig, family: LatentDefaults, fields: Fields) -> ModelConfig:
    latent = parse_latent(fields, family)
    rope = replace(config.rope, interleaved=is_interleaved(fields, family))
    return replace(config, latent=latent, rope=rope, **latent_fields(latent, rope.scaling))
