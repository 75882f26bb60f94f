"""The config.json of encoders, with transformers' defaults."""

from collections.abc import Mapping
from typing import Annotated, Any, TypeVar

import msgspec

from tercet.scheduler.file_fields import FileFields, Only
from tercet.scheduler.model_files import ModelError
from tercet.scheduler.models.config.config_fields import LEAST_NUMBER, MOST_LAYERS, MOST_NUMBER

Size = Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)]
Layers = Annotated[int, msgspec.Meta(ge=1, le=MOST_LAYERS)]
Real = Annotated[float, msgspec.Meta(ge=LEAST_NUMBER, le=MOST_NUMBER)]
_Shape = TypeVar("_Shape", bound=msgspec.Struct)

TRAINING = "used in training only"
HEADS = "of heads that are left out"
_RETURNS = "of what a call returns"
KERNELS = "a choice of the reference's kernels"
_NOTE = "a name or a version"
_TOKENS = "special tokens are those of tokenizer.json"
FIELDS_OF_ALL = frozenset({"architectures", "dtype", "torch_dtype", "id2label", "num_labels", "problem_type"})
NO_EFFECT = {
    "_name_or_path": _NOTE,
    "attn_implementation": KERNELS,
    "bos_token_id": _TOKENS,
    "classifier_dropout": TRAINING,
    "cls_token_id": _TOKENS,
    "eos_token_id": _TOKENS,
    "gradient_checkpointing": TRAINING,
    "initializer_range": TRAINING,
    "label2id": "the inverse of id2label",
    "model_type": _NOTE,
    "output_attentions": _RETURNS,
    "output_hidden_states": _RETURNS,
    "return_dict": _RETURNS,
    "sep_token_id": _TOKENS,
    "tie_word_embeddings": HEADS,
    "transformers_version": _NOTE,
    "use_cache": _RETURNS,
}
REFUSED = {
    "add_cross_attention": Only("only encoders are supported"),
    "auto_map": Only("the model brings its own code, and Tercet never runs a model's code"),
    "is_decoder": Only("only encoders, whose tokens see each other, are supported"),
    "is_encoder_decoder": Only("only encoders are supported"),
    "pruned_heads": Only("heads that are left out are not supported"),
    "quantization_config": Only("quantized checkpoints are served only of models that generate"),
}


class Labels(msgspec.Struct, frozen=True, kw_only=True):
    """The labels of a classifier."""

    id2label: dict[int, str] = {}
    num_labels: Size | None = None


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


def pad_of_decoder(config: Mapping[str, Any], default: int | None) -> int | None:
    """Return the padding token that a decoder's classifier skips at the end of a text, if any."""
    pad = config.get("pad_token_id", default)
    if pad is not None and type(pad) is not int:
        raise ModelError(f"config.json: pad_token_id: {pad!r} is no token id")
    return pad


def parse_shape(config: Mapping[str, Any], shape: type[_Shape], family: FileFields | None = None) -> _Shape:
    """Parse the config of an encoder with the fields of its family. Raise ModelError with one line that names the wrong
    field.
    """
    if config.get("auto_map"):
        raise ModelError("config.json: auto_map: the model brings its own code, and Tercet never runs a model's code")
    if family is not None:
        family.check(config, "config.json: ")
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
