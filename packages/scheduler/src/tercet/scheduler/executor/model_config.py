"""What a model's config.json says, read by our own parser: no code of a model directory ever runs.

Both forms are read: the older one (`rope_theta`, `rope_scaling`, `torch_dtype`) and that of transformers 5
(`rope_parameters`, flat or by layer type, `dtype`). A field left out means what it means to transformers.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from tercet.kernels.ops.rope import ROPE_TYPES, RopeScaling
from tercet.scheduler.executor.config_fields import Fields, wrong
from tercet.scheduler.executor.gemma_config import gemma_fields, is_gemma, plain_gemma
from tercet.scheduler.executor.granite_config import granite_fields
from tercet.scheduler.executor.layer_kinds import unrotated_layers, windows_of
from tercet.scheduler.executor.moe_config import MoeConfig, parse_moe
from tercet.scheduler.executor.quantized_config import StoredQuantization, parse_quantization
from tercet.scheduler.model_files import ModelError, read_json, saved_dtype, served_dtype
from tercet.scheduler.models.registry import architecture_of

logger = logging.getLogger(__name__)

_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
_REFUSED = {
    "auto_map": "the model brings its own code, and Tercet never runs a model's code",
    "clip_qkv": "queries, keys and values that are clipped are not supported",
}
_KNOWN_CODE = (
    "Ernie4_5ForCausalLM",
    "GlmForCausalLM",
    "GraniteForCausalLM",
    "Phi3ForCausalLM",
    "SeedOssForCausalLM",
    "SmolLM3ForCausalLM",
)
"""Families that may be published with code of their own, which computes what is computed here."""
_RMS_NORM_EPS = {
    "Ernie4_5ForCausalLM": 1e-5,
    "GlmForCausalLM": 1.5625e-7,
    "GptOssForCausalLM": 1e-5,
    "MixtralForCausalLM": 1e-5,
    "OlmoeForCausalLM": 1e-5,
    "Phi3ForCausalLM": 1e-5,
}
_ROPE_THETA = {
    "Ernie4_5ForCausalLM": 5e5,
    "GptOssForCausalLM": 150_000.0,
    "MixtralForCausalLM": 1e6,
    "SmolLM3ForCausalLM": 2e6,
}
_ROPE: dict[str, dict[str, Any]] = {
    "GptOssForCausalLM": {
        "rope_type": "yarn",
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "truncate": False,
    }
}
_HEAD_DIM = {
    "Ernie4_5ForCausalLM": 128,
    "GlmForCausalLM": 128,
    "GptOssForCausalLM": 64,
    "Qwen3ForCausalLM": 128,
    "SeedOssForCausalLM": 128,
}
"""Where a family's default is its own."""
_ATTENTION_BIAS = {
    "Ernie4_5ForCausalLM": ("use_bias", False),
    "GlmForCausalLM": ("attention_bias", True),
    "GptOssForCausalLM": ("attention_bias", True),
    "Qwen2MoeForCausalLM": ("qkv_bias", True),
    "SeedOssForCausalLM": ("attention_bias", True),
}
"""The field that says whether there is one, and what it means to leave it out."""
_ROTATED_SHARE = {"GlmForCausalLM": 0.5, "Phi3ForCausalLM": 1.0}
"""Families in which `partial_rotary_factor` has a meaning, and which one where it is left out."""
_TIED = ("Ernie4_5ForCausalLM", "SmolLM3ForCausalLM")
"""Families whose head is the embedding, unless they are told otherwise."""
_INTERLEAVED = ("Ernie4_5ForCausalLM", "GlmForCausalLM")


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """Rotary position embedding: its base, and how it is stretched beyond the length the model was trained for."""

    theta: float
    scaling: RopeScaling | None = None
    share: float = 1.0
    """Of each head, from its beginning, that is rotated."""
    interleaved: bool = False
    """Whether an element is rotated with its neighbour, not with one half a head away."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderShape:
    """What whoever serves a decoder-only model must know of it, whichever modules compute it."""

    architecture: str
    layers: int
    kv_heads: int
    head_dim: int
    vocab_size: int
    context_length: int
    """The model's own limit, or the shorter one that it is built to serve."""
    eos_token_ids: tuple[int, ...]
    dtype: torch.dtype
    """In which it is served."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig(DecoderShape):
    """The whole config of a model of this package."""

    hidden_size: int
    intermediate_size: int
    heads: int
    rms_norm_eps: float
    rope: RopeConfig
    tie_word_embeddings: bool
    attention_bias: bool
    """Of queries, keys and values, and of what attention gives where a family has one bias or none in all four."""
    mlp_bias: bool
    windows: tuple[int, ...]
    """Tokens of sliding window in each layer, the token itself included; 0 sees everything."""
    output_bias: bool = False
    """Of what attention gives, in families that say so by itself."""
    quantization: StoredQuantization | None = None
    moe: MoeConfig | None = None
    local_rope: RopeConfig | None = None
    """Of layers with a window, where they rotate otherwise."""
    unrotated: frozenset[int] = frozenset()
    """Layers that do not rotate."""
    embedding_scale: float = 1.0
    """What the vectors of tokens are multiplied by."""
    attention_scale: float | None = None
    """None is head_dim**-0.5."""
    softcap: float = 0.0
    """Of attention; 0 is none, as of the next."""
    logit_softcap: float = 0.0
    logit_divisor: float = 1.0

    @classmethod
    def load(cls, directory: Path, dtype: str = "auto") -> "ModelConfig":
        """The config of a model directory, served in `dtype` ("auto": the one it was saved in).

        Raises ModelError with one line that names the field at fault.
        """
        generation = directory / "generation_config.json"
        return parse_config(
            read_json(directory / "config.json"), read_json(generation) if generation.is_file() else {}, dtype
        )

    @property
    def rotary_dim(self) -> int:
        """Elements of a head that are rotated."""
        return int(self.head_dim * self.rope.share)

    def window_of(self, layer: int) -> int:
        """Tokens of sliding window in a layer; 0 sees everything."""
        return self.windows[layer]


def parse_config(config: Mapping[str, Any], generation: Mapping[str, Any], dtype: str = "auto") -> ModelConfig:
    """A ModelConfig from the objects in config.json and generation_config.json. Raises ModelError."""
    architecture = architecture_of(config)
    for name, why in _REFUSED.items():
        if config.get(name) and not (name == "auto_map" and architecture in _KNOWN_CODE):
            raise wrong(name, why)
    gemma = is_gemma(architecture)
    config = plain_gemma(config, architecture) if gemma else config
    fields = Fields(config)
    if (act := config.get("hidden_act", "silu")) != "silu":
        raise wrong("hidden_act", f"{act!r} is not supported, only silu")
    heads = fields.count("num_attention_heads")
    hidden_size = fields.count("hidden_size")
    layers = fields.count("num_hidden_layers")
    rope = _rope(config, architecture)
    result = ModelConfig(
        architecture=architecture,
        hidden_size=hidden_size,
        intermediate_size=fields.count("intermediate_size"),
        layers=layers,
        heads=heads,
        kv_heads=fields.count("num_key_value_heads", heads),
        head_dim=fields.count("head_dim", _HEAD_DIM.get(architecture, hidden_size // heads)),
        vocab_size=fields.count("vocab_size"),
        context_length=_context_length(fields, rope.scaling),
        rms_norm_eps=fields.number("rms_norm_eps", _RMS_NORM_EPS.get(architecture, 1e-6)),
        rope=rope,
        tie_word_embeddings=fields.flag("tie_word_embeddings", architecture in _TIED),
        attention_bias=_attention_bias(fields, architecture),
        mlp_bias=fields.flag("use_bias" if architecture == "Ernie4_5ForCausalLM" else "mlp_bias"),
        output_bias=fields.flag("attention_out_bias"),
        windows=windows_of(fields, architecture, layers),
        eos_token_ids=end_ids(config, generation),
        dtype=saved_torch_dtype(config, dtype),
        quantization=parse_quantization(config),
        moe=parse_moe(fields, architecture, layers),
        unrotated=unrotated_layers(fields, layers) if architecture == "SmolLM3ForCausalLM" else frozenset(),
        local_rope=_rope(config["local_rope"], architecture) if gemma and "local_rope" in config else None,
        **(gemma_fields(config, architecture) if gemma else {}),
    )
    if architecture == "GraniteForCausalLM":
        result = replace(result, **granite_fields(fields, result.rms_norm_eps))
    if heads % result.kv_heads:
        raise wrong("num_key_value_heads", f"{result.kv_heads} does not divide the {heads} attention heads")
    _check_rotation(result)
    return result


def _rope(config: Mapping[str, Any], architecture: str) -> RopeConfig:
    """The rotary embedding of every layer, from whichever form the config has, or the family's where it has none."""
    name = next((name for name in ("rope_scaling", "rope_parameters") if config.get(name)), "")
    values = config.get(name, _ROPE.get(architecture, {}))
    if not isinstance(values, dict):
        raise wrong(name, "is not an object")
    if values and all(isinstance(value, dict) for value in values.values()):
        by_layer = list(values.values())
        if any(value != by_layer[0] for value in by_layer):
            raise wrong(name, "layer types that rotate differently are not supported")
        values = by_layer[0]
    kind = values.get("rope_type", values.get("type", "default"))
    if architecture == "Phi3ForCausalLM":
        config = {"original_max_position_embeddings": 4096, **config}
    if kind == "su" or (kind == "yarn" and architecture == "Phi3ForCausalLM"):
        kind = "longrope"  # as it was called before it had a name, with factors of its own
    if kind not in ROPE_TYPES or "mrope_section" in values:
        raise wrong(name, f"type {kind!r} is not supported, only {', '.join(ROPE_TYPES)}")
    outside = {field: config.get(field) for field in ("rope_theta", "partial_rotary_factor")}
    fields = Fields({**outside, **values}, f"{name}." if name else "")
    theta = fields.number("rope_theta", _ROPE_THETA.get(architecture, 1e4))
    return RopeConfig(
        theta=theta,
        scaling=_scaling(kind, fields, config),
        share=_rotated_share(fields, architecture),
        interleaved=architecture in _INTERLEAVED,
    )


def _rotated_share(fields: Fields, architecture: str) -> float:
    share = fields.number("partial_rotary_factor", _ROTATED_SHARE.get(architecture, 1.0))
    if share > 1 or (share < 1 and architecture not in _ROTATED_SHARE):
        raise wrong("partial_rotary_factor", f"{share} is not supported, only 1.0")
    return share


def _check_rotation(config: ModelConfig) -> None:
    """Raise ModelError for what cannot be turned in pairs."""
    if config.head_dim % 2:
        raise wrong("head_dim", f"{config.head_dim} is odd, and rotary embedding turns pairs")
    rotated, scaling = config.rotary_dim, config.rope.scaling
    if rotated % 2 or not rotated:
        raise wrong("partial_rotary_factor", f"{rotated} of {config.head_dim} elements are no pairs to turn")
    if scaling is not None and scaling.type == "longrope":
        for name in ("short_factor", "long_factor"):
            if (found := len(getattr(scaling, name))) != rotated // 2:
                raise wrong(name, f"has {found} numbers for {rotated // 2} pairs")


def _scaling(kind: str, fields: Fields, config: Mapping[str, Any]) -> RopeScaling | None:
    match kind:
        case "linear":
            return RopeScaling(type=kind, factor=fields.number("factor"))
        case "llama3":
            low, high = fields.number("low_freq_factor"), fields.number("high_freq_factor")
            if low >= high:
                raise wrong(f"{fields.where}high_freq_factor", f"{high} is not above low_freq_factor {low}")
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
                factor=fields.number("factor", Fields(config).count("max_position_embeddings") / original),
                original_max_position_embeddings=original,
                attention_factor=fields.number("attention_factor") if fields.has("attention_factor") else None,
                beta_fast=fields.number("beta_fast", 32.0),
                beta_slow=fields.number("beta_slow", 1.0),
                mscale=fields.number("mscale") if fields.has("mscale") else 0.0,
                mscale_all_dim=fields.number("mscale_all_dim") if fields.has("mscale_all_dim") else 0.0,
                truncate=fields.flag("truncate", True),
            )
        case "longrope":
            original = _original_context(fields, config)
            return RopeScaling(
                type=kind,
                factor=fields.number("factor", Fields(config).count("max_position_embeddings") / original),
                original_max_position_embeddings=original,
                attention_factor=fields.number("attention_factor") if fields.has("attention_factor") else None,
                short_factor=fields.numbers("short_factor"),
                long_factor=fields.numbers("long_factor"),
            )
        case _:  # "dynamic" begins to scale where the context length ends
            return None


def _context_length(fields: Fields, scaling: RopeScaling | None) -> int:
    """max_position_embeddings; a yarn config may name the length before stretching there."""
    length = fields.count("max_position_embeddings")
    if scaling is None or scaling.type != "yarn":
        return length
    return max(length, int(scaling.original_max_position_embeddings * scaling.factor))


def _original_context(fields: Fields, config: Mapping[str, Any]) -> int:
    name = "original_max_position_embeddings"
    if config.get(name) is not None:
        return Fields(config).count(name)
    return fields.count(name, Fields(config).count("max_position_embeddings"))


def _attention_bias(fields: Fields, architecture: str) -> bool:
    if architecture == "Qwen2ForCausalLM":
        return True
    return fields.flag(*_ATTENTION_BIAS.get(architecture, ("attention_bias", False)))


def end_ids(config: Mapping[str, Any], generation: Mapping[str, Any]) -> tuple[int, ...]:
    """The ids that end a text: those of generation_config.json, or else of config.json."""
    value = generation.get("eos_token_id")
    value = config.get("eos_token_id") if value is None else value
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if any(type(token) is not int or token < 0 for token in ids):
        raise wrong("eos_token_id", f"{value!r} is neither a token id nor a list of them")
    return tuple(dict.fromkeys(ids))


def saved_torch_dtype(config: Mapping[str, Any], wanted: str = "auto") -> torch.dtype:
    """The dtype to serve a model in: the one it was saved in, unless another is wanted. Raises ModelError."""
    name = saved_dtype(config) if wanted == "auto" else wanted
    if name not in _DTYPES:
        raise ModelError(f"dtype {name!r} is not supported, only {', '.join(_DTYPES)}")
    return _DTYPES[name]


def computed_dtype(directory: Path, wanted: str, device: torch.device, *, encoder: bool = False) -> str:
    """See `served_dtype`. The log says where that is not what the model was saved in, and where it is slow."""
    dtype = served_dtype(directory, wanted, gpu=device.type == "cuda", encoder=encoder)
    saved = saved_dtype(read_json(directory / "config.json"))
    if wanted == "auto" and dtype != saved:
        logger.info("weights saved in %s are computed in %s, which is faster on a CPU", saved, dtype)
    elif dtype == "float16" and device.type == "cpu":
        logger.warning("float16 runs on torch here, many times slower than bfloat16 or float32")
    return dtype
