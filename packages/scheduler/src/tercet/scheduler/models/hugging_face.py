"""Decoders that are not written here run on transformers' own modules, with their attention over the paged cache.

transformers calls the attention function that its config names from every layer, with that layer's queries, keys and
values (https://huggingface.co/docs/transformers/attention_interface). Ours gives them to the step, which comes through
the forwards of all modules as a keyword. Weights come from safetensors alone, and no code of a model directory runs.
"""

import logging
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from tercet.scheduler.executor.config_fields import Fields, wrong
from tercet.scheduler.executor.model_config import DecoderShape, end_ids, saved_torch_dtype
from tercet.scheduler.executor.trial import try_out
from tercet.scheduler.model_files import ModelError, read_header, read_json, weight_files
from tercet.scheduler.models.layer_ops import Batch
from tercet.scheduler.models.registry import named_architecture

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

logger = logging.getLogger(__name__)

_NAME = "tercet"
"""Of our attention, among those that transformers knows."""

_REFUSED = {
    "quantization_config": "weights in few bits are read for architectures of Tercet's own only",
    "is_encoder_decoder": "models with an encoder and a decoder are not supported",
    "kv_lora_rank": "keys and values that are cached in a latent form are not supported",
}
_STRETCHED = ("dynamic", "longrope")
"""Rotary embeddings that change for all rows of a step when one of them grows past the length of training."""


def read_shape(directory: Path, dtype: str) -> DecoderShape:
    """The shape of a model that transformers has a decoder for. Raises ModelError, for all others too."""
    config = read_json(directory / "config.json")
    theirs, architecture = _config(directory), named_architecture(config)
    _class_of(theirs, architecture)
    fields = _fields(theirs)
    heads = fields.count("num_attention_heads")
    generation = directory / "generation_config.json"
    ends = config if config.get("eos_token_id") is not None else fields.values
    return DecoderShape(
        architecture=architecture,
        layers=fields.layers(),
        kv_heads=fields.count("num_key_value_heads", heads),
        head_dim=fields.count("head_dim", fields.count("hidden_size") // heads),
        vocab_size=fields.count("vocab_size"),
        context_length=_context_length(fields),
        eos_token_ids=end_ids(ends, read_json(generation) if generation.is_file() else {}),
        dtype=saved_torch_dtype(config, dtype),
    )


def load(directory: Path, shape: DecoderShape, device: torch.device, *, dummy: bool = False) -> "HuggingFaceCausalLM":
    """The model of a directory, its weights those of the checkpoint or random ones. Raises ModelError."""
    given: dict[str, Any] = {"dtype": shape.dtype, "attn_implementation": _registered()}
    config = _config(directory)
    kind = _class_of(config, shape.architecture)
    if dummy:
        with device:
            model = kind._from_config(config, **given)
    else:
        for path in weight_files(directory):
            read_header(path)  # says of whatever is no whole file what is wrong
        model, found = kind.from_pretrained(
            directory,
            config=config,
            local_files_only=True,
            use_safetensors=True,
            ignore_mismatched_sizes=True,  # here; they are refused below
            output_loading_info=True,
            **given,
        )
        _check_fit(directory, found)
    logger.info("%s runs on transformers' own modules", shape.architecture)
    hosted = HuggingFaceCausalLM(model.to(device).requires_grad_(False).eval())
    try_out(hosted, shape, device)
    return hosted


class HuggingFaceCausalLM(nn.Module):
    """A `Model`. Body and head of a causal model are told apart, for the head is asked of some tokens only."""

    def __init__(self, model: "PreTrainedModel") -> None:
        super().__init__()
        self.body = model.base_model
        setattr(model, model.base_model_prefix, _Handed())
        self.head = model

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor, batch: Batch) -> torch.Tensor:
        """[tokens], [tokens] -> [tokens, hidden]."""
        out = self.body(
            input_ids=input_ids[None],
            position_ids=positions[None],
            use_cache=False,
            return_dict=True,
            tercet_batch=batch,
        )
        hidden: torch.Tensor = out.last_hidden_state[0]
        return hidden

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[rows, hidden] -> [rows, vocab], with whatever the model does to logits; float32 on a CPU."""
        logits: torch.Tensor = self.head(inputs_embeds=hidden[None], use_cache=False, return_dict=True).logits[0]
        return logits.float() if logits.device.type == "cpu" else logits


class _Handed(nn.Module):
    """Takes the place of a body: what it is given is what the body gave."""

    def forward(self, *_: object, inputs_embeds: torch.Tensor, **__: object) -> "_Given":
        """In a form that heads of all models can read."""
        return _Given(inputs_embeds)


class _Given:
    """The output of a body, of which there is nothing but the hidden states."""

    def __init__(self, hidden: torch.Tensor) -> None:
        self.last_hidden_state = hidden

    def __getitem__(self, index: int) -> torch.Tensor:
        return (self.last_hidden_state,)[index]

    def __getattr__(self, name: str) -> None:
        """Caches, attentions, losses of routers: none."""
        if name.startswith("__"):
            raise AttributeError(name)


@cache
def _registered() -> str:
    """The name of our attention, which transformers knows from here on."""
    from transformers import AttentionInterface
    from transformers.utils import logging as their_logging

    AttentionInterface.register(_NAME, _attend)
    their_logging.disable_progress_bar()
    return _NAME


def _attend(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    tercet_batch: Any = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **_: object,
) -> tuple[torch.Tensor, None]:
    """Attention of one layer: [1, heads, tokens, head_dim] -> [1, tokens, heads, head_dim], and no weights.

    `s_aux` are attention sinks. A step says itself who sees whom, so there is no mask.
    """
    if tercet_batch is None or attention_mask is not None:
        raise TypeError("its layers do not hand the step on, or have masks of their own")
    q, k, v = (heads[0].transpose(0, 1).contiguous() for heads in (query, key, value))
    out = tercet_batch.attend(
        module.layer_idx,
        q,
        k,
        v,
        scale=q.shape[2] ** -0.5 if scaling is None else scaling,
        window=sliding_window or 0,
        softcap=softcap or 0.0,
        sinks=s_aux,
    )
    return out[None], None


def _config(directory: Path) -> "PreTrainedConfig":
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # each of its configs raises what it likes
        reason = " ".join(str(error).split())
        raise ModelError(f"config.json: transformers cannot read it: {reason}") from error


def _class_of(config: "PreTrainedConfig", architecture: str) -> type["PreTrainedModel"]:
    """The decoder that transformers has for a config, perhaps one that reads images, too.

    Raises ModelError unless it is the architecture, and takes our attention.
    """
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    kinds: dict[str, Any] = {}
    for auto in (AutoModelForCausalLM, AutoModelForImageTextToText):
        found = auto._model_mapping.get(type(config), ())
        kinds |= {kind.__name__: kind for kind in (found if isinstance(found, tuple) else [found])}
    if architecture not in kinds:
        why = f"transformers has {' and '.join(kinds)} for it" if kinds else "transformers has no decoder for it"
        raise wrong("architectures", f"{architecture!r} is not supported: {why}")
    model: type[PreTrainedModel] = kinds[architecture]
    if not model._supports_attention_backend:
        raise wrong("architectures", f"{architecture!r} is not supported: it cannot be given another attention")
    return model


_READ = (
    *("num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim", "hidden_size", "vocab_size"),
    *("max_position_embeddings", "rope_parameters", "layer_types", "eos_token_id", *_REFUSED),
)


def _fields(config: "PreTrainedConfig") -> Fields:
    """What is read of a config, by the names that transformers gives to what families call otherwise."""
    text = config.get_text_config(decoder=True)
    try:
        values = {name: getattr(text, name, None) for name in _READ}
    except ValueError as error:  # of layers that differ
        raise ModelError(f"config.json: {error}") from error
    for name, reason in _REFUSED.items():
        if values[name] or getattr(config, name, None):
            raise wrong(name, reason)
    if strange := {*(values["layer_types"] or ())} - {"full_attention", "sliding_attention"}:
        raise wrong("layer_types", f"{' and '.join(sorted(strange))} is not supported")
    return Fields(values)


def _context_length(fields: Fields) -> int:
    """As long as no rotary embedding is stretched, of those of all types of layers."""
    length = fields.count("max_position_embeddings")
    rope = fields.values["rope_parameters"] or {}
    each = [rope] if "rope_type" in rope else rope.values()
    stretched = [Fields(one) for one in each if one.get("rope_type") in _STRETCHED]
    return min([length, *(one.count("original_max_position_embeddings", length) for one in stretched)])


def _check_fit(directory: Path, found: dict[str, Any]) -> None:
    """Raise ModelError for weights that a checkpoint lacks or has otherwise; what it has beside them is logged."""
    shapes = [f"{name} {list(has)} instead of {list(wanted)}" for name, has, wanted in found["mismatched_keys"]]
    lacks = {"missing": found["missing_keys"], "of the wrong shape": shapes}
    if problems := "; ".join(f"{what}: {', '.join(sorted(keys))}" for what, keys in lacks.items() if keys):
        raise ModelError(f"{directory} does not fit its config.json: {problems}")
    if found["unexpected_keys"]:
        logger.warning("%s holds what is not read: %s", directory, ", ".join(sorted(found["unexpected_keys"])))
