"""Decoders that run on transformers' own modules, with their attention over the paged KV cache.

transformers calls the attention function that its config names from every layer, with that layer's queries, keys and
values (https://huggingface.co/docs/transformers/attention_interface). Our function passes them to the step, which
reaches it as a keyword argument through the forward methods of all modules. Weights come from safetensors only, and no
code of a model directory runs.
"""

import logging
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from tercet.kernels.attention.api import AttentionParams
from tercet.scheduler.architectures import named_architecture
from tercet.scheduler.model_files import ModelError, read_header, read_json, weight_files
from tercet.scheduler.models.attention_masks import attention_of, probe_windows
from tercet.scheduler.models.config.config_fields import Fields, wrong
from tercet.scheduler.models.config.model_config import DecoderShape, end_ids, saved_torch_dtype
from tercet.scheduler.models.layers.layer_ops import Batch
from tercet.scheduler.models.trial_text import text_length, trial_text

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

logger = logging.getLogger(__name__)

_NAME = "tercet"
"""The name of our attention in transformers' registry."""

_REFUSED = {
    "quantization_config": "weights in few bits are read for architectures of Tercet's own only",
    "is_encoder_decoder": "models with an encoder and a decoder are not supported",
    "kv_lora_rank": "keys and values that are cached in a latent form are not supported",
    "attn_temperature_tuning": "queries that are scaled by the place in a step are not supported",
}
_STRETCHED = ("dynamic", "longrope")
"""Rotary embeddings that change for all rows of a step when one of them exceeds the trained length."""

Verify = Callable[["HuggingFaceCausalLM", DecoderShape, Callable[[torch.Tensor], torch.Tensor], torch.Tensor], None]
"""Check of a model against its plain forward on a text: (model, shape, plain forward, token ids)."""


def read_shape(directory: Path, dtype: str) -> DecoderShape:
    """Read the shape of a model that transformers has a decoder for. Raise ModelError for any other."""
    config = read_json(directory / "config.json")
    theirs, architecture = _config(directory), named_architecture(config)
    kind = _class_of(theirs, architecture)
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
        context_length=_context_length(fields, _first_position(kind, theirs)),
        eos_token_ids=end_ids(ends, read_json(generation) if generation.is_file() else {}),
        dtype=saved_torch_dtype(config, dtype),
    )


def load(
    directory: Path, shape: DecoderShape, device: torch.device, verify: Verify, *, dummy: bool = False
) -> "HuggingFaceCausalLM":
    """Return the model of a directory, with the checkpoint's weights or random ones.

    Raise ModelError, also if its logits differ from those of transformers' plain forward pass (`smoke_test.py`).
    """
    given: dict[str, Any] = {"dtype": shape.dtype, "attn_implementation": _registered()}
    config = _config(directory)
    kind = _class_of(config, shape.architecture)
    with _model_errors(f"transformers cannot load {shape.architecture}"):
        if dummy:
            with device:
                model = kind._from_config(config, **given)
        else:
            model = _from_weights(kind, directory, config, given)
        model = model.to(device).requires_grad_(False).eval()
    text = _trial_text(model, shape, device)
    with torch.inference_mode(), _model_errors(f"{shape.architecture} cannot be run"):
        windows = probe_windows(model, text, shape.context_length)
    hosted = HuggingFaceCausalLM(model, windows, _first_position(kind, config))
    verify(hosted, shape, hosted.plain_logits, text)
    logger.info("%s runs on transformers' own modules", shape.architecture)
    return hosted


def _from_weights(
    kind: type["PreTrainedModel"], directory: Path, config: "PreTrainedConfig", given: dict[str, Any]
) -> "PreTrainedModel":
    """Return a model with the weights of a directory, and with nothing else from it.

    transformers looks for other files, too, and merges an adapter beside the weights. Therefore it gets a directory of
    links to the weight files only.
    """
    files = weight_files(directory)
    for path in files:
        read_header(path)  # raises ModelError for an incomplete file
    if (directory / "adapter_config.json").exists():
        logger.warning("%s: the adapter beside the weights is not applied; load adapters by name", directory)
    index = directory / "model.safetensors.index.json"
    with tempfile.TemporaryDirectory(prefix="tercet-weights-") as shown:
        for path in [*files, index] if index.is_file() else files:
            (Path(shown) / path.name).symlink_to(path.resolve())
        (Path(shown) / "generation_config.json").write_text("{}")  # transformers looks for this file
        model, found = kind.from_pretrained(
            shown,
            config=config,
            local_files_only=True,
            use_safetensors=True,
            ignore_mismatched_sizes=True,  # they are refused below
            output_loading_info=True,
            **given,
        )
    _check_fit(directory, found)
    return model


@contextmanager
def _model_errors(what: str) -> Iterator[None]:
    """Turn any error of transformers, except lack of memory, into a ModelError of one line."""
    try:
        yield
    except (ModelError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # its models raise errors of any type
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ModelError(f"{what}: {reason}") from error


def _trial_text(model: "PreTrainedModel", shape: DecoderShape, device: torch.device) -> torch.Tensor:
    """Return tokens without special meaning: no padding, no image placeholders."""
    configs = [model.config.to_dict(), model.config.get_text_config(decoder=True).to_dict()]
    named = {value for each in configs for name, value in each.items() if "token" in name and type(value) is int}
    length = text_length(model.num_parameters(), shape.context_length, device)
    return trial_text(length, shape.vocab_size, named).to(device)


class _Step(NamedTuple):
    """A step as the attention of a layer receives it."""

    batch: Batch
    windows: dict[int, int]
    params: dict[int, AttentionParams]  # of layers that have run

    def params_of(self, layer: int, scale: float, softcap: float | None, sinks: torch.Tensor | None) -> AttentionParams:
        """Return the parameters of a layer: those of its last call, unless it has changed them."""
        params, softcap = self.params.get(layer), softcap or 0.0
        if params is None or params.scale != scale or params.softcap != softcap or params.sinks is not sinks:
            window = self.windows.get(layer, 0)
            params = AttentionParams(scale=scale, window=window, softcap=softcap, sinks=sinks)
            self.params[layer] = params
        return params


class HuggingFaceCausalLM(nn.Module):
    """A `Model` from transformers' causal model. Body and head run separately, so that only some tokens pass the head.

    `windows` are those of its layers (`attention_masks.py`); texts begin at position `first`.
    """

    def __init__(self, model: "PreTrainedModel", windows: dict[int, int], first: int = 0) -> None:
        super().__init__()
        body = model.base_model
        if body is model:
            raise ModelError(f"{type(model).__name__} cannot be served: its head cannot run apart from its body")
        self.body = body
        self._windows = windows
        self._params: dict[int, AttentionParams] = {}
        self._first = first
        self._given = _BodyOutput({name for name, _ in body.named_children()})
        setattr(model, model.base_model_prefix, self._given)
        self.head = model

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor, batch: Batch) -> torch.Tensor:
        """Return the hidden states [tokens, hidden] of input ids [tokens] at positions [tokens]."""
        out = self.body(
            input_ids=input_ids[None],
            position_ids=positions[None] + self._first,
            use_cache=False,
            return_dict=True,
            tercet_step=_Step(batch, self._windows, self._params),
        )
        hidden: torch.Tensor = out.last_hidden_state[0]
        return hidden

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return logits [rows, vocab], with all of the model's operations on logits; float32 on a CPU."""
        logits: torch.Tensor = self.head(inputs_embeds=hidden[None], use_cache=False, return_dict=True).logits[0]
        return logits.float() if logits.device.type == "cpu" else logits

    def plain_logits(self, text: torch.Tensor) -> torch.Tensor:
        """Return logits [tokens, vocab] of transformers' own forward pass of a whole text."""
        model = self.head
        setattr(model, model.base_model_prefix, self.body)
        try:
            with attention_of(model, "eager"):
                logits: torch.Tensor = model(input_ids=text[None], use_cache=False, return_dict=True).logits[0]
        finally:
            setattr(model, model.base_model_prefix, self._given)
        return logits


class _BodyOutput(nn.Module):
    """A module in place of a body, or of a part of one, that returns the hidden states that it receives."""

    def __init__(self, parts: set[str]) -> None:
        super().__init__()
        self._parts = parts

    def __getattr__(self, name: str) -> Any:
        """Return itself for a part of the body: some heads call a decoder within it."""
        parts = self.__dict__.get("_parts", ())
        return self if name in parts else super().__getattr__(name)

    def forward(self, *_: object, inputs_embeds: torch.Tensor, **__: object) -> "_HiddenStates":
        """Return hidden states in a form that heads of all models can read."""
        return _HiddenStates(inputs_embeds)


class _HiddenStates:
    """The output of a body, reduced to the hidden states."""

    def __init__(self, hidden: torch.Tensor) -> None:
        self.last_hidden_state = hidden

    def __getitem__(self, index: int) -> torch.Tensor:
        return (self.last_hidden_state,)[index]

    def __getattr__(self, name: str) -> None:
        """Return None for caches, attentions and router losses."""
        if name.startswith("__"):
            raise AttributeError(name)


_NO_EFFECT = ("position_ids", "cache_position", "token_type_ids")
"""Tensors that some models pass to attention, which ignores them."""


@cache
def _registered() -> str:
    """Register our attention with transformers, and return its name."""
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
    tercet_step: _Step | None = None,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **more: object,
) -> tuple[torch.Tensor, None]:
    """Compute attention of one layer: [1, heads, tokens, head_dim] -> [1, tokens, heads, head_dim], without weights.

    `s_aux` are attention sinks. There is no mask, because the step decides which tokens a token sees.
    """
    if tercet_step is None:
        raise TypeError("its layers do not pass keywords on to their attention")
    if attention_mask is not None:
        raise TypeError("its layers have masks of their own")
    if strange := [name for name, value in more.items() if isinstance(value, torch.Tensor) and name not in _NO_EFFECT]:
        raise TypeError(f"its attention is given {', '.join(strange)}, which is not supported")
    layer: Any = module.layer_idx
    q, k, v = (heads[0].transpose(0, 1).contiguous() for heads in (query, key, value))
    params = tercet_step.params_of(layer, q.shape[2] ** -0.5 if scaling is None else scaling, softcap, s_aux)
    return tercet_step.batch.attend(layer, q, k, v, params)[None], None


def _config(directory: Path) -> "PreTrainedConfig":
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # its configs raise errors of any type
        reason = " ".join(str(error).split())
        raise ModelError(f"config.json: transformers cannot read it: {reason}") from error


def _class_of(config: "PreTrainedConfig", architecture: str) -> type["PreTrainedModel"]:
    """Return the decoder class that transformers has for a config, which may also read images.

    Raise ModelError unless it is the architecture, and accepts another attention function.
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
    """Return the fields that are read, under transformers' standard names."""
    text = config.get_text_config(decoder=True)
    values = {name: _field(text, name) for name in _READ}
    for name, reason in _REFUSED.items():
        if values[name] or getattr(config, name, None):
            raise wrong(name, reason)
    if strange := {*(values["layer_types"] or ())} - {"full_attention", "sliding_attention"}:
        raise wrong("layer_types", f"{' and '.join(sorted(map(str, strange)))} is not supported")
    return Fields(values)


def _field(config: "PreTrainedConfig", name: str) -> Any:
    """Return a field of a config, None if it has none. Raise ModelError for a field that differs by layer."""
    try:
        return getattr(config, name, None)
    except Exception as error:  # of a type that depends on the version
        raise wrong(name, "layers that differ in it are not supported") from error


def _first_position(kind: type["PreTrainedModel"], config: "PreTrainedConfig") -> int:
    """Return the position of a text's first token.

    Roberta and related models count from after the padding token: their embeddings have a method for that.
    """
    module = sys.modules[kind.__module__]
    counts = any(hasattr(each, "create_position_ids_from_input_ids") for each in vars(module).values())
    padding = getattr(config.get_text_config(decoder=True), "pad_token_id", None)
    return padding + 1 if counts and type(padding) is int and padding >= 0 else 0


def _context_length(fields: Fields, first: int = 0) -> int:
    """Return the number of positions from `first` on that need no stretching of a rotary embedding."""
    length = fields.count("max_position_embeddings") - first
    rope = fields.values["rope_parameters"] or {}
    each = [rope] if "rope_type" in rope else rope.values()
    stretched = [Fields(one) for one in each if isinstance(one, dict) and one.get("rope_type") in _STRETCHED]
    length = min([length, *(one.count("original_max_position_embeddings", length) for one in stretched)])
    if length < 1:
        raise wrong("max_position_embeddings", f"there are none from position {first} on")
    return length


def _check_fit(directory: Path, found: dict[str, Any]) -> None:
    """Raise ModelError for missing or misshapen weights; log unexpected ones."""
    shapes = [f"{name} {list(has)} instead of {list(wanted)}" for name, has, wanted in found["mismatched_keys"]]
    lacks = {"missing": found["missing_keys"], "of the wrong shape": shapes}
    if problems := "; ".join(f"{what}: {', '.join(sorted(keys))}" for what, keys in lacks.items() if keys):
        raise ModelError(f"{directory} does not fit its config.json: {problems}")
    if found["unexpected_keys"]:
        logger.warning("%s: ignored unexpected tensors: %s", directory, ", ".join(sorted(found["unexpected_keys"])))
