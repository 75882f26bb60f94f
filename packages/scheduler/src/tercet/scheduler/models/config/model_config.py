"""The config of a model, in typed values."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from tercet.scheduler.device.devices import slow_dtype
from tercet.scheduler.model_files import ModelError, read_json, saved_dtype, served_dtype
from tercet.scheduler.models.config.altup_config import AltUpConfig
from tercet.scheduler.models.config.config_fields import wrong
from tercet.scheduler.models.config.latent_config import LatentConfig
from tercet.scheduler.models.config.moe_config import MoeConfig
from tercet.scheduler.models.config.quantized_config import StoredQuantization
from tercet.scheduler.models.config.recurrent_config import RecurrentConfig
from tercet.scheduler.models.config.rope_config import RopeConfig

logger = logging.getLogger(__name__)

_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


class HeadShape(NamedTuple):
    """The heads of keys and values of a layer."""

    kv_heads: int
    head_dim: int
    value_dim: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderShape:
    """The properties of a decoder-only model that serving needs, independent of the modules that compute it."""

    architecture: str
    layers: int
    kv_heads: int
    head_dim: int
    vocab_size: int
    context_length: int
    """The model's own limit, or the shorter length that is served."""
    eos_token_ids: tuple[int, ...]
    dtype: torch.dtype
    """The dtype in which it is served."""

    @property
    def cached_layers(self) -> Sequence[int]:
        """The layers that cache keys and values."""
        return range(self.layers)

    def heads_of(self, layer: int) -> HeadShape:  # noqa: ARG002
        """Return the heads of keys and values of a layer."""
        return HeadShape(self.kv_heads, self.head_dim, self.head_dim)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig(DecoderShape):
    """The whole config of a model that is implemented here."""

    hidden_size: int
    intermediate_size: int
    heads: int
    rms_norm_eps: float
    rope: RopeConfig
    tie_word_embeddings: bool
    attention_bias: bool
    """Queries, keys and values have biases."""
    mlp_bias: bool
    windows: tuple[int, ...]
    """Tokens of sliding window in each layer, including the token itself; 0 is full attention."""
    output_bias: bool = False
    """The output projection of attention has a bias."""
    causal: bool = True
    """A token attends to earlier tokens only; if false, the model returns vectors only."""
    norms_heads: bool = False
    """Queries and keys are normalized, in families with a field for it."""
    mtp_layers: int = 0
    """Multi-token-prediction layers that checkpoints may have after the others; they are not read."""
    quantization: StoredQuantization | None = None
    moe: MoeConfig | None = None
    latent: LatentConfig | None = None
    """Multi-head latent attention; `head_dim` is then the length of a cached vector."""
    recurrent: RecurrentConfig | None = None
    """Layers with a recurrent state."""
    attention_layers: Sequence[int] | None = None
    """Layers with attention; None: all without a recurrent state."""
    local_rope: RopeConfig | None = None
    """The rotation of layers with a window, if it differs from that of the rest."""
    spare_positions: int = 0
    """Rows of rotary tables after those of the context length, which steps with images fill. See `Rotary.write`."""
    unrotated: frozenset[int] = frozenset()
    """Layers without rotary embedding."""
    chunks: Mapping[int, int] = field(default_factory=dict)
    """Tokens of a chunk in layers with chunked attention."""
    own_heads: Mapping[int, HeadShape] = field(default_factory=dict)
    """Heads of keys and values in layers in which they differ."""
    shared_caches: Mapping[int, int] = field(default_factory=dict)
    """Layers without a KV cache of their own, and for each the layer whose cache it reads."""
    keys_as_values: bool = False
    """Layers without a window have values that are their keys before norm and rotation."""
    value_scale: float = 1.0
    """Factor of values before they are cached."""
    wide_sharing_mlps: bool = False
    """Layers in `shared_caches` have MLPs of twice the size."""
    layer_input_size: int = 0
    """Elements of the input that each layer has of its own; 0 for none."""
    layer_input_vocab: int = 0
    """Tokens with embeddings for these inputs."""
    layer_input_padding: int = 0
    """Token whose embedding for these inputs an image's tokens have."""
    altup: AltUpConfig | None = None
    """Several hidden states for each token, one of which a layer computes with."""
    activation: str = "gelu"
    """Name of the activation of MLPs without a gate, in families with a field for it."""
    encoder: "ModelConfig | None" = None
    """The encoder of a model with an encoder and a decoder of text."""
    learned_positions: int = 0
    """Positions with an embedding; 0 for none."""
    embedding_scale: float = 1.0
    """Factor of the token embeddings."""
    attention_scale: float | None = None
    """Factor of the attention scores; None is head_dim**-0.5."""
    softcap: float = 0.0
    """Soft cap of the attention scores; 0 for none."""
    logit_softcap: float = 0.0
    """Soft cap of the logits; 0 for none."""
    logit_divisor: float = 1.0

    @property
    def cached_layers(self) -> Sequence[int]:
        """The layers that cache keys and values."""
        if self.attention_layers is not None:
            return self.attention_layers
        recurrent = frozenset() if self.recurrent is None else self.recurrent.layers
        return [layer for layer in range(self.layers) if layer not in recurrent and layer not in self.shared_caches]

    def heads_of(self, layer: int) -> HeadShape:
        """Return the heads of the keys and values that a layer reads, which another layer may have cached."""
        layer = self.shared_caches.get(layer, layer)
        return self.own_heads.get(layer, HeadShape(self.kv_heads, self.head_dim, self.head_dim))

    @property
    def rotated_head_dim(self) -> int:
        """Elements of the vector that is rotated: a head, or the separate part of it with latent attention."""
        return self.head_dim if self.latent is None else self.latent.rope_dim

    @property
    def rotary_dim(self) -> int:
        """Elements of it that are rotated."""
        return self.rope.rotated(self.rotated_head_dim)

    def window_of(self, layer: int) -> int:
        """Return the tokens of sliding window in a layer; 0 is full attention."""
        return self.windows[layer]

    def chunk_of(self, layer: int) -> int:
        """Return the tokens of a chunk in a layer; 0 for none, or if all served lengths are within the first chunk."""
        chunk = self.chunks.get(layer, 0)
        return chunk if self.context_length > chunk else 0


def with_context_length(config: DecoderShape, length: int) -> DecoderShape:
    """Return a config with a shorter context length and unchanged rotation."""
    if isinstance(config, ModelConfig):
        whole = config.context_length
        local = None if config.local_rope is None else config.local_rope.for_length(whole)
        config = replace(config, rope=config.rope.for_length(whole), local_rope=local)
    return replace(config, context_length=length)


def end_ids(config: Mapping[str, Any], generation: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the ids that end a text: those of generation_config.json, or else of config.json."""
    value = generation.get("eos_token_id")
    value = config.get("eos_token_id") if value is None else value
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if any(type(token) is not int or token < 0 for token in ids):
        raise wrong("eos_token_id", f"{value!r} is neither a token id nor a list of them")
    return tuple(dict.fromkeys(ids))


def saved_torch_dtype(config: Mapping[str, Any], wanted: str = "auto") -> torch.dtype:
    """Return the dtype to serve a model in: `wanted`, or the one it was saved in. Raise ModelError."""
    name = saved_dtype(config) if wanted == "auto" else wanted
    if name not in _DTYPES:
        raise ModelError(f"dtype {name!r} is not supported, only {', '.join(_DTYPES)}")
    return _DTYPES[name]


def computed_dtype(directory: Path, wanted: str, device: torch.device, *, encoder: bool = False) -> str:
    """Return the dtype to compute in; see `served_dtype`. Log it if it differs from the saved dtype or is slow."""
    slow = slow_dtype(device)
    dtype = served_dtype(directory, wanted, slow=slow, encoder=encoder)
    saved = saved_dtype(read_json(directory / "config.json"))
    if wanted == "auto" and dtype != saved:
        place = "a CPU" if device.type == "cpu" else "this GPU"
        logger.info("weights saved in %s are computed in %s, which is faster on %s", saved, dtype, place)
    elif dtype == slow == "float16":
        logger.warning("float16 runs on torch here, many times slower than bfloat16 or float32")
    elif dtype == slow:
        logger.warning("this GPU has no arithmetic for %s, which is slower here than float16 and float32", dtype)
    return dtype
