"""The config.json of encoders, with transformers' defaults."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

import msgspec

from tercet.scheduler.model_files import ModelError
from tercet.scheduler.models.config.config_fields import LEAST_NUMBER, MOST_LAYERS, MOST_NUMBER
from tercet.scheduler.models.config.encoder_fields import BERT, MODERNBERT

Size = Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)]
Layers = Annotated[int, msgspec.Meta(ge=1, le=MOST_LAYERS)]
Real = Annotated[float, msgspec.Meta(ge=LEAST_NUMBER, le=MOST_NUMBER)]
LayerType = Literal["full_attention", "sliding_attention"]
_Shape = TypeVar("_Shape", bound=msgspec.Struct)


class BertShape(msgspec.Struct, frozen=True, kw_only=True):
    """The config of Bert, Roberta and XLM-Roberta."""

    vocab_size: Size
    hidden_size: Size = 768
    num_hidden_layers: Layers = 12
    num_attention_heads: Size = 12
    intermediate_size: Size = 3072
    hidden_act: str = "gelu"
    max_position_embeddings: Size = 512
    type_vocab_size: Size = 2
    layer_norm_eps: Real = 1e-12
    pad_token_id: Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)] = 1
    """Roberta counts positions from the one after it."""
    position_embedding_type: Literal["absolute"] = "absolute"


class RopeShape(msgspec.Struct, frozen=True, kw_only=True):
    """The rotary embedding of one type of layer, in the format of transformers 5."""

    rope_theta: Real | None = None
    rope_type: Literal["default"] = "default"


class ModernBertShape(msgspec.Struct, frozen=True, kw_only=True):
    """The config of ModernBERT."""

    vocab_size: Size
    hidden_size: Size = 768
    num_hidden_layers: Layers = 22
    num_attention_heads: Size = 12
    intermediate_size: Size = 1152
    hidden_activation: str = "gelu"
    max_position_embeddings: Size = 8192
    norm_eps: Real = 1e-5
    norm_bias: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    local_attention: Annotated[int, msgspec.Meta(ge=2, le=2**31 - 1)] = 128
    layer_types: list[LayerType] = []
    global_attn_every_n_layers: Size = 3
    rope_parameters: dict[LayerType, RopeShape] = {}
    global_rope_theta: Real = 160_000.0
    local_rope_theta: Real = 10_000.0
    classifier_pooling: Literal["cls", "mean"] = "cls"
    classifier_bias: bool = False
    classifier_activation: str = "gelu"

    def slides(self, layer: int) -> bool:
        """Return whether a layer has local attention."""
        if self.layer_types:
            return self.layer_types[layer] == "sliding_attention"
        return layer % self.global_attn_every_n_layers != 0

    def theta(self, *, slides: bool) -> float:
        """Return the rotary base of a type of layer."""
        given = self.rope_parameters.get("sliding_attention" if slides else "full_attention")
        if given is not None and given.rope_theta is not None:
            return given.rope_theta
        return self.local_rope_theta if slides else self.global_rope_theta


class Labels(msgspec.Struct, frozen=True, kw_only=True):
    """The labels of a classifier."""

    id2label: dict[int, str] = {}
    num_labels: Size | None = None


_FIELDS = {BertShape: BERT, ModernBertShape: MODERNBERT}
_PADS = {"Ernie4_5": 0, "Glm": 151_329, "Olmoe": 1, "Phi3": 32_000, "SeedOss": 1, "SmolLM3": 128_004}
"""transformers' default of `pad_token_id` for decoders; other families have none."""


def parse_labels(config: Mapping[str, Any]) -> list[str]:
    """Return the labels in the order of their ids; without names, transformers' default ones. Raise ModelError."""
    given = parse_shape(config, Labels)
    if not given.id2label:
        return [f"LABEL_{number}" for number in range(given.num_labels or 2)]
    count = len(given.id2label)
    if given.num_labels not in (None, count):
        raise ModelError(f"config.json: num_labels: {given.num_labels} is not the {count} of id2label")
    if sorted(given.id2label) != [*range(count)]:
        raise ModelError(f"config.json: id2label: must name the labels 0 to {count - 1}")
    return [given.id2label[number] for number in range(count)]


def pad_of_decoder(config: Mapping[str, Any], family: str) -> int | None:
    """Return the padding token that a decoder's classifier skips at the end of a text, if any."""
    pad = config.get("pad_token_id", _PADS.get(family))
    if pad is not None and type(pad) is not int:
        raise ModelError(f"config.json: pad_token_id: {pad!r} is no token id")
    return pad


def parse_shape(config: Mapping[str, Any], shape: type[_Shape]) -> _Shape:
    """Parse the config of an encoder. Raise ModelError with one line that names the wrong field."""
    if config.get("auto_map"):
        raise ModelError("config.json: auto_map: the model brings its own code, and Tercet never runs a model's code")
    if (fields := _FIELDS.get(shape)) is not None:
        fields.check(config, "config.json: ")
    given = {name: value for name, value in config.items() if value is not None}
    try:
        parsed = msgspec.convert(given, shape, strict=True, str_keys=True)
    except msgspec.ValidationError as error:
        raise ModelError(f"config.json: {error}") from error
    heads, size = getattr(parsed, "num_attention_heads", 1), getattr(parsed, "hidden_size", 1)
    if size % heads:
        raise ModelError(f"config.json: num_attention_heads: {heads} does not divide hidden_size {size}")
    layer_types = getattr(parsed, "layer_types", [])
    if layer_types and len(layer_types) != getattr(parsed, "num_hidden_layers", 0):
        raise ModelError("config.json: layer_types: must name each layer's")
    return parsed
