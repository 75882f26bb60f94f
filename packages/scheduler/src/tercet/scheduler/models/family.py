"""The record of a model family: everything that distinguishes it from others."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tercet.scheduler.models.audio.audio_model import AudioModel
from tercet.scheduler.models.audio.sound_model import SoundModel
from tercet.scheduler.models.config.family_config import FamilyConfig
from tercet.scheduler.models.config.model_config import ModelConfig
from tercet.scheduler.models.layers.decoder import CausalLM, build_decoder
from tercet.scheduler.models.layers.packed import Packed
from tercet.scheduler.models.layers.shard import Shard
from tercet.scheduler.models.vision.image_model import ImageModel


@dataclass(frozen=True, kw_only=True)
class ModelFamily(FamilyConfig):
    """Decoders that differ in their configs alone. A module of `families` has one or several, in `FAMILIES`."""

    architectures: tuple[str, ...]
    """The names in config.json, as in `architectures.MODULES`. With an `XModel`, X gives vectors and scores, too."""
    build: Callable[[ModelConfig, Shard], CausalLM] = build_decoder
    """Makes the model on torch's default device, without loaded weights."""
    pad_token_id: int | None = None
    """The default of `pad_token_id`, which a classifier skips at the end of a text."""
    images: Callable[[Path], ImageModel | None] = lambda _: None
    """Returns the images that the model in a directory takes."""
    audio: Callable[[Path], AudioModel | None] = lambda _: None
    """Returns the audio that the model in a directory takes."""
    sounds: Callable[[Path], SoundModel | None] = lambda _: None
    """Returns the sounds that the model in a directory takes in prompts. Such a model takes no images."""
    start: Callable[[Path], tuple[int, ...]] = lambda _: ()
    """Returns the tokens that the decoder of the model in a directory starts from, if an encoder reads the prompts."""
    not_native: str = ""
    """The reason why native kernels cannot run any of its models; empty if they can."""


Scores = Callable[[torch.Tensor, Packed], torch.Tensor]
"""A classifier's head: [tokens, hidden] -> [inputs, labels]."""


@dataclass(frozen=True, kw_only=True)
class EncoderModel:
    """A model without loaded weights. `module(packed)` returns [tokens, hidden]."""

    module: nn.Module
    causal: bool = False
    context_length: int
    vocab_size: int
    token_types: int = 1
    hidden_size: int
    labels: Sequence[str] = ()
    """Empty for an embedding model."""
    scores: Scores | None = None
    dtype: torch.dtype


@dataclass(frozen=True, kw_only=True)
class EncoderFamily:
    """Bidirectional models, which give vectors or scores but no text."""

    architectures: tuple[str, ...]
    """The `XModel`s in `architectures.MODULES`."""
    build: Callable[[Mapping[str, Any], Sequence[str], str, int | None], EncoderModel]
    """Makes the model on torch's default device: (config.json, labels, dtype, longest input that is served)."""
