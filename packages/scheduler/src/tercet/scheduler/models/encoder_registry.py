"""The registry of encoders: the module of each architecture that returns vectors or scores."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import torch
from torch import nn

from tercet.protocol.messages.values import Task
from tercet.scheduler.model_files import ModelError
from tercet.scheduler.model_task import DECODERS, ENCODERS, family_of
from tercet.scheduler.models.config.encoder_config import (
    BertShape,
    ModernBertShape,
    pad_of_decoder,
    parse_labels,
    parse_shape,
)
from tercet.scheduler.models.config.model_config import ModelConfig, parse_config, saved_torch_dtype
from tercet.scheduler.models.decoder_encoder import DecoderClassifier, DecoderEncoder
from tercet.scheduler.models.families.bert import Bert, BertClassifier, RobertaClassifier
from tercet.scheduler.models.families.modernbert import ModernBert, ModernBertClassifier
from tercet.scheduler.models.layers.packed import Packed
from tercet.scheduler.models.registry import build_model

Scores = Callable[[torch.Tensor, Packed], torch.Tensor]
"""A classifier's head: [tokens, hidden] -> [inputs, labels]."""


@dataclass(frozen=True, kw_only=True)
class EncoderModel:
    """A model without loaded weights. `module(packed)` returns [tokens, hidden]."""

    module: nn.Module
    causal: bool
    context_length: int
    vocab_size: int
    token_types: int = 1
    hidden_size: int
    labels: Sequence[str] = ()
    """Empty for an embedding model."""
    scores: Scores | None = None
    dtype: torch.dtype


def build_encoder(
    config: Mapping[str, Any],
    task: Task,
    dtype: str = "auto",
    device: torch.device | str = "cpu",
    longest: int | None = None,
) -> EncoderModel:
    """Build the model that config.json describes. Raise ModelError for an unsupported one.

    `longest` is the served input length if it is below the model's limit; it bounds rotary tables.
    """
    names = config.get("architectures")
    architecture = str(names[0]) if isinstance(names, list) and names else ""
    family, _ = family_of(architecture)
    labels = parse_labels(config) if task is Task.CLASSIFY else []
    with torch.device(device):
        if family in DECODERS:
            model = _decoder(config, family, labels, dtype, device, longest)
        elif ENCODERS.get(family) == "modernbert":
            model = _modernbert(config, labels, dtype, longest)
        elif family in ENCODERS:
            model = _bert(config, family, labels, dtype)
        else:
            known = ", ".join([*ENCODERS, *DECODERS])
            raise ModelError(
                f"config.json: architectures: {architecture!r} makes no vectors here: it is none of {known}"
            )
    model.module.eval()
    return model


def _bert(config: Mapping[str, Any], family: str, labels: Sequence[str], dtype: str) -> EncoderModel:
    shape = parse_shape(config, BertShape)
    kind = saved_torch_dtype(config, dtype)
    is_bert = ENCODERS[family] == "bert"
    pad = None if is_bert else shape.pad_token_id
    module: Bert | BertClassifier | RobertaClassifier
    if not labels:
        module = Bert(shape, kind, pad=pad)
    elif pad is None:
        module = BertClassifier(shape, len(labels), kind)
    else:
        module = RobertaClassifier(shape, len(labels), kind, pad=pad)
    model = _model_of(
        module, shape, labels, kind, context_length=shape.max_position_embeddings - (0 if pad is None else pad + 1)
    )
    return replace(model, token_types=shape.type_vocab_size)


def _modernbert(config: Mapping[str, Any], labels: Sequence[str], dtype: str, longest: int | None) -> EncoderModel:
    shape = parse_shape(config, ModernBertShape)
    positions = min(shape.max_position_embeddings, longest or shape.max_position_embeddings)
    shape = msgspec.structs.replace(shape, max_position_embeddings=positions)
    kind = saved_torch_dtype(config, dtype)
    module = ModernBertClassifier(shape, len(labels), kind) if labels else ModernBert(shape, kind)
    return _model_of(module, shape, labels, kind, context_length=shape.max_position_embeddings)


def _decoder(
    config: Mapping[str, Any],
    family: str,
    labels: Sequence[str],
    dtype: str,
    device: torch.device | str,
    longest: int | None,
) -> EncoderModel:
    shape = parse_config({**config, "architectures": [f"{family}ForCausalLM"]}, {}, dtype)
    shape = replace(shape, context_length=min(shape.context_length, longest or shape.context_length))
    decoder = build_model(replace(shape, tie_word_embeddings=True), device).model  # without an output head
    module = DecoderEncoder(decoder)
    if labels:
        pad = pad_of_decoder(config, family)
        module = DecoderClassifier(decoder, shape.hidden_size, len(labels), shape.dtype, pad=pad)
    return _model_of(module, shape, labels, shape.dtype, context_length=shape.context_length, causal=shape.causal)


def _model_of(
    module: nn.Module,
    shape: BertShape | ModernBertShape | ModelConfig,
    labels: Sequence[str],
    dtype: torch.dtype,
    *,
    context_length: int,
    causal: bool = False,
) -> EncoderModel:
    """Return a module as a model, with its head if it has one."""
    heads = BertClassifier | RobertaClassifier | ModernBertClassifier | DecoderClassifier
    return EncoderModel(
        module=module,
        scores=module.scores if isinstance(module, heads) else None,
        causal=causal,
        context_length=context_length,
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        labels=labels,
        dtype=dtype,
    )
