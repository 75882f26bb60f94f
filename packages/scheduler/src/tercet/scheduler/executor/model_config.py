"""What a model's config.json says, read by our own parser: no code of a model directory ever runs.

Both forms are read: the older one (`rope_theta`, `rope_scaling`, `torch_dtype`) and that of transformers 5
(`rope_parameters`, flat or by layer type, `dtype`). A field left out means what it means to transformers.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tercet.kernels.ops.rope import ROPE_TYPES, RopeScaling
from tercet.scheduler.executor.quantized_config import Quantization, parse_quantization
from tercet.scheduler.model_files import ModelError, read_json, saved_dtype
from tercet.scheduler.models.registry import architecture_of

_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
_REFUSED = {"auto_map": "the model brings its own code, and Tercet never runs a model's code"}
_LARGEST = 2**31 - 1
_MISSING: Any = object()


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """Rotary position embedding: its base, and how it is stretched beyond the length the model was trained for."""

    theta: float
    scaling: RopeScaling | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """The shape of a decoder-only model, and the dtype it is served in."""

    architecture: str
    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab_size: int
    context_length: int
    rms_norm_eps: float
    rope: RopeConfig
    tie_word_embeddings: bool
    attention_bias: bool
    mlp_bias: bool
    windows: tuple[int, ...]
    """Tokens of sliding window in each layer, the token itself included; 0 sees everything."""
    eos_token_ids: tuple[int, ...]
    dtype: torch.dtype
    quantization: Quantization | None = None

    @classmethod
    def load(cls, directory: Path, dtype: str = "auto") -> "ModelConfig":
        """The config of a model directory, served in `dtype` ("auto": the one it was saved in).

        Raises ModelError with one line that names the field at fault.
        """
        generation = directory / "generation_config.json"
        return parse_config(
            read_json(directory / "config.json"), read_json(generation) if generation.is_file() else {}, dtype
        )

    def window_of(self, layer: int) -> int:
        """Tokens of sliding window in a layer; 0 sees everything."""
        return self.windows[layer]


def parse_config(config: Mapping[str, Any], generation: Mapping[str, Any], dtype: str = "auto") -> ModelConfig:
    """A ModelConfig from the objects in config.json and generation_config.json. Raises ModelError."""
    architecture = architecture_of(config)
    for name, why in _REFUSED.items():
        if config.get(name):
            raise _wrong(name, why)
    fields = _Fields(config)
    if (act := config.get("hidden_act", "silu")) != "silu":
        raise _wrong("hidden_act", f"{act!r} is not supported, only silu")
    heads = fields.count("num_attention_heads")
    hidden_size = fields.count("hidden_size")
    layers = fields.count("num_hidden_layers")
    rope = _rope(config)
    result = ModelConfig(
        architecture=architecture,
        hidden_size=hidden_size,
        intermediate_size=fields.count("intermediate_size"),
        layers=layers,
        heads=heads,
        kv_heads=fields.count("num_key_value_heads", heads),
        head_dim=fields.count("head_dim", 128 if architecture == "Qwen3ForCausalLM" else hidden_size // heads),
        vocab_size=fields.count("vocab_size"),
        context_length=_context_length(fields, rope.scaling),
        rms_norm_eps=fields.number("rms_norm_eps", 1e-6),
        rope=rope,
        tie_word_embeddings=fields.flag("tie_word_embeddings"),
        attention_bias=fields.flag("attention_bias"),
        mlp_bias=fields.flag("mlp_bias"),
        windows=_windows(fields, architecture, layers),
        eos_token_ids=_eos_token_ids(config, generation),
        dtype=saved_torch_dtype(config, dtype),
        quantization=parse_quantization(config),
    )
    if heads % result.kv_heads:
        raise _wrong("num_key_value_heads", f"{result.kv_heads} does not divide the {heads} attention heads")
    if result.head_dim % 2:
        raise _wrong("head_dim", f"{result.head_dim} is odd, and rotary embedding turns pairs")
    return result


class _Fields:
    """Typed reads of a JSON object; null counts as absent, and an absent field without a default is an error."""

    def __init__(self, values: Mapping[str, Any], where: str = "") -> None:
        self.values = values
        self.where = where

    def count(self, name: str, default: int = _MISSING, least: int = 1) -> int:
        """An integer of at least `least`."""
        value = self._get(name, default)
        if type(value) is not int or not least <= value <= _LARGEST:
            raise self._wrong(name, f"{value!r} is not a positive integer")
        return value

    def number(self, name: str, default: float = _MISSING) -> float:
        """A positive, finite number."""
        value = self._get(name, default)
        if type(value) not in (int, float) or not 0 < value < math.inf:
            raise self._wrong(name, f"{value!r} is not a positive number")
        return float(value)

    def has(self, name: str) -> bool:
        """Whether the field is there and not null."""
        return self.values.get(name) is not None

    def flag(self, name: str, default: bool = False) -> bool:
        """A boolean."""
        value = self._get(name, default)
        if type(value) is not bool:
            raise self._wrong(name, f"{value!r} is neither true nor false")
        return value

    def _get(self, name: str, default: Any) -> Any:
        value = self.values.get(name)
        value = default if value is None else value
        if value is _MISSING:
            raise self._wrong(name, "is missing")
        return value

    def _wrong(self, name: str, why: str) -> ModelError:
        return _wrong(self.where + name, why)


def _wrong(name: str, why: str) -> ModelError:
    return ModelError(f"config.json: {name}: {why}")


def _rope(config: Mapping[str, Any]) -> RopeConfig:
    """The rotary embedding of every layer, from whichever form the config has."""
    name = next((name for name in ("rope_scaling", "rope_parameters") if config.get(name)), "")
    values = config.get(name, {})
    if not isinstance(values, dict):
        raise _wrong(name, "is not an object")
    if values and all(isinstance(value, dict) for value in values.values()):
        by_layer = list(values.values())
        if any(value != by_layer[0] for value in by_layer):
            raise _wrong(name, "layer types that rotate differently are not supported")
        values = by_layer[0]
    if config.get("partial_rotary_factor", values.get("partial_rotary_factor")) not in (None, 1.0):
        raise _wrong("partial_rotary_factor", "only 1.0 is supported")
    kind = values.get("rope_type", values.get("type", "default"))
    if kind not in ROPE_TYPES or "mrope_section" in values:
        raise _wrong(name, f"type {kind!r} is not supported, only {', '.join(ROPE_TYPES)}")
    fields = _Fields({"rope_theta": config.get("rope_theta"), **values}, f"{name}." if name else "")
    theta = fields.number("rope_theta", 10000.0)
    return RopeConfig(theta=theta, scaling=_scaling(kind, fields, config))


def _scaling(kind: str, fields: _Fields, config: Mapping[str, Any]) -> RopeScaling | None:
    match kind:
        case "linear":
            return RopeScaling(type=kind, factor=fields.number("factor"))
        case "llama3":
            low, high = fields.number("low_freq_factor"), fields.number("high_freq_factor")
            if low >= high:
                raise _wrong(f"{fields.where}high_freq_factor", f"{high} is not above low_freq_factor {low}")
            return RopeScaling(
                type=kind,
                factor=fields.number("factor"),
                original_max_position_embeddings=_original_context(fields, config),
                low_freq_factor=low,
                high_freq_factor=high,
            )
        case "yarn":
            original = _original_context(fields, config)
            return RopeScaling(
                type=kind,
                factor=fields.number("factor", _Fields(config).count("max_position_embeddings") / original),
                original_max_position_embeddings=original,
                attention_factor=fields.number("attention_factor") if fields.has("attention_factor") else None,
                beta_fast=fields.number("beta_fast", 32.0),
                beta_slow=fields.number("beta_slow", 1.0),
                mscale=fields.number("mscale") if fields.has("mscale") else 0.0,
                mscale_all_dim=fields.number("mscale_all_dim") if fields.has("mscale_all_dim") else 0.0,
                truncate=fields.flag("truncate", True),
            )
        case _:  # "dynamic" begins to scale where the context length ends
            return None


def _context_length(fields: _Fields, scaling: RopeScaling | None) -> int:
    """max_position_embeddings; a yarn config may name the length before stretching there."""
    length = fields.count("max_position_embeddings")
    if scaling is None or scaling.type != "yarn":
        return length
    return max(length, int(scaling.original_max_position_embeddings * scaling.factor))


def _original_context(fields: _Fields, config: Mapping[str, Any]) -> int:
    name = "original_max_position_embeddings"
    if config.get(name) is not None:
        return _Fields(config).count(name)
    return fields.count(name, _Fields(config).count("max_position_embeddings"))


def _windows(fields: _Fields, architecture: str, layers: int) -> tuple[int, ...]:
    """Mistral slides in every layer unless told null; Qwen where `layer_types` says, or from `max_window_layers` on."""
    if architecture == "MistralForCausalLM":
        null = fields.values.get("sliding_window", 4096) is None
        return (0 if null else fields.count("sliding_window", 4096),) * layers
    if architecture not in ("Qwen2ForCausalLM", "Qwen3ForCausalLM") or not fields.flag("use_sliding_window"):
        return (0,) * layers
    window = fields.count("sliding_window", 4096)
    kinds = fields.values.get("layer_types")
    if kinds is None:
        first = fields.count("max_window_layers", 28, least=0)
        return tuple(0 if layer < first else window for layer in range(layers))
    names = ["full_attention", "sliding_attention"]
    if not isinstance(kinds, list) or len(kinds) != layers or any(kind not in names for kind in kinds):
        raise _wrong("layer_types", f"must say {' or '.join(names)} for each of the {layers} layers")
    return tuple(window if kind == "sliding_attention" else 0 for kind in kinds)


def _eos_token_ids(config: Mapping[str, Any], generation: Mapping[str, Any]) -> tuple[int, ...]:
    """The ids that end a text: those of generation_config.json, or else of config.json."""
    value = generation.get("eos_token_id")
    value = config.get("eos_token_id") if value is None else value
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if any(type(token) is not int or token < 0 for token in ids):
        raise _wrong("eos_token_id", f"{value!r} is neither a token id nor a list of them")
    return tuple(dict.fromkeys(ids))


def saved_torch_dtype(config: Mapping[str, Any], wanted: str = "auto") -> torch.dtype:
    """The dtype to serve a model in: the one it was saved in, unless another is wanted. Raises ModelError."""
    name = saved_dtype(config) if wanted == "auto" else wanted
    if name not in _DTYPES:
        raise ModelError(f"dtype {name!r} is not supported, only {', '.join(_DTYPES)}")
    return _DTYPES[name]
