"""The registry of models: the record of each architecture's family, imported when it is needed."""

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from tercet.protocol.messages.values import Task
from tercet.scheduler.architectures import (
    MODULES,
    architecture_of,
    embedders,
    is_decoder,
    is_encoder,
    split_architecture,
)
from tercet.scheduler.model_files import ModelError, read_json
from tercet.scheduler.models.config.config_fields import wrong
from tercet.scheduler.models.config.config_parser import parse_family_config
from tercet.scheduler.models.config.encoder_config import pad_of_decoder, parse_labels
from tercet.scheduler.models.config.model_config import ModelConfig
from tercet.scheduler.models.config.text_config import text_config
from tercet.scheduler.models.decoder_encoder import DecoderClassifier, DecoderEncoder
from tercet.scheduler.models.family import EncoderFamily, EncoderModel, ModelFamily
from tercet.scheduler.models.layers.decoder import CausalLM
from tercet.scheduler.models.layers.shard import WHOLE, Shard


def family_of(architecture: str) -> ModelFamily:
    """Return the family of a decoder's architecture. Raise KeyError for one that is not implemented here."""
    family: ModelFamily = _record(architecture)
    return family


def _record(architecture: str) -> Any:
    path = MODULES[architecture].replace("/", ".")
    module = importlib.import_module(f"tercet.scheduler.models.families.{path}")
    return next(family for family in module.FAMILIES if architecture in family.architectures)


def load_config(directory: Path, dtype: str = "auto") -> ModelConfig:
    """Load the config of a model directory, served in `dtype` ("auto": the one it was saved in).

    Raise ModelError with one line that names the wrong field.
    """
    generation = directory / "generation_config.json"
    config = parse_config(_with_quantization(directory), read_json(generation) if generation.is_file() else {}, dtype)
    if not config.causal:
        raise wrong("is_causal", "a model that attends to following tokens generates no text, it only embeds")
    return config


def _with_quantization(directory: Path) -> Mapping[str, Any]:
    """Return config.json, with the quantization of ModelOpt's hf_quant_config.json if it has none itself."""
    config, beside = read_json(directory / "config.json"), directory / "hf_quant_config.json"
    if config.get("quantization_config") or not beside.is_file():
        return config
    given = read_json(beside).get("quantization")
    if not isinstance(given, dict):
        raise ModelError(f"{beside.name}: quantization is not an object")
    return {**config, "quantization_config": {"quant_method": "modelopt", **given}}


def parse_config(config: Mapping[str, Any], generation: Mapping[str, Any], dtype: str = "auto") -> ModelConfig:
    """Parse the contents of config.json and generation_config.json. Raise ModelError."""
    config = text_config(config)
    return parse_family_config(family_of(architecture_of(config)), config, generation, dtype)


def build_model(config: ModelConfig, device: torch.device | str = "cpu", shard: Shard = WHOLE) -> CausalLM:
    """Build the model of a config on a device, without loaded weights. Raise ValueError for an impossible shard."""
    if shard.experts.size > 1 and config.moe is None:
        flag = f"--expert-parallel-size {shard.experts.size}" if shard.attention.size == 1 else "--enable-dp-attention"
        raise ValueError(f"{flag}: {config.architecture} has no experts")
    family = family_of(config.architecture)
    with torch.device(device):
        return family.build(config, shard).eval()


def build_encoder(
    config: Mapping[str, Any],
    task: Task,
    dtype: str = "auto",
    device: torch.device | str = "cpu",
    longest: int | None = None,
) -> EncoderModel:
    """Build the model for vectors or scores that config.json describes. Raise ModelError for an unsupported one.

    `longest` is the served input length if it is below the model's limit; it bounds rotary tables.
    """
    names = config.get("architectures")
    architecture = str(names[0]) if isinstance(names, list) and names else ""
    prefix, _ = split_architecture(architecture)
    labels = parse_labels(config) if task is Task.CLASSIFY else []
    with torch.device(device):
        if is_decoder(prefix):
            model = _build_decoder_encoder(config, f"{prefix}ForCausalLM", labels, dtype, device, longest)
        elif is_encoder(prefix):
            family: EncoderFamily = _record(f"{prefix}Model")
            model = family.build(config, labels, dtype, longest)
        else:
            raise ModelError(
                f"config.json: architectures: {architecture!r} makes no vectors here: "
                f"it is none of {', '.join(embedders())}"
            )
    model.module.eval()
    return model


def _build_decoder_encoder(
    config: Mapping[str, Any],
    architecture: str,
    labels: Sequence[str],
    dtype: str,
    device: torch.device | str,
    longest: int | None,
) -> EncoderModel:
    shape = parse_config({**config, "architectures": [architecture]}, {}, dtype)
    shape = replace(shape, context_length=min(shape.context_length, longest or shape.context_length))
    decoder = build_model(replace(shape, tie_word_embeddings=True), device).model  # without an output head
    module = DecoderEncoder(decoder)
    if labels:
        pad = pad_of_decoder(config, family_of(architecture).pad_token_id)
        module = DecoderClassifier(decoder, shape.hidden_size, len(labels), shape.dtype, pad=pad)
    return EncoderModel(
        module=module,
        scores=module.scores if isinstance(module, DecoderClassifier) else None,
        causal=shape.causal,
        context_length=shape.context_length,
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        labels=labels,
        dtype=shape.dtype,
    )
