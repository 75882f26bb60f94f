"""The record of a model's audio: its form, the encoder, and the tokens that transcripts may have."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from tercet.protocol.messages.audio import AudioFormat
from tercet.scheduler.model_files import read_header, weight_files
from tercet.scheduler.models.weights.weights import LoadProgress, check_fit, checkpoint_tensors, fill

Samples = np.ndarray[tuple[int], np.dtype[np.int16]]
FULL_SCALE = 32_768
_PARTS = ("model.encoder.", "encoder.")
"""Prefixes of the encoder's tensors in checkpoints of the whole model and of its base model."""


class AudioEncoder(nn.Module):
    """transformers' own modules: features of samples, and an encoder of features."""

    def __init__(self, encoder: nn.Module, features: Callable[..., Any], rate: int) -> None:
        super().__init__()
        self.encoder = encoder
        self._features = features
        self._rate = rate

    def forward(self, samples: Samples) -> torch.Tensor:
        """Return hidden states [positions, hidden] of samples at the model's rate."""
        parameter = next(self.encoder.parameters())
        floats = samples.astype(np.float32) / np.float32(FULL_SCALE)
        features = self._features(floats, sampling_rate=self._rate, return_tensors="pt").input_features
        hidden: torch.Tensor = self.encoder(features.to(parameter.device, parameter.dtype)).last_hidden_state[0]
        return hidden


@dataclass(frozen=True, kw_only=True)
class TranscriptRules:
    """Tokens that transcripts may not have, as generation_config.json says."""

    suppressed: tuple[int, ...]
    suppressed_first: tuple[int, ...]
    """Tokens that begin no transcript."""
    end: int
    """Token that ends a transcript. Those of text are before it."""
    most_initial: int | None
    """Latest time that begins the first segment, in tokens of time; None for any."""


@dataclass(frozen=True, kw_only=True)
class Alignment:
    """Heads of cross-attention that follow the audio as the text goes on."""

    heads: tuple[tuple[int, int], ...]
    """Layer and head of each."""
    median: int
    """Width of the median filter over positions, odd."""


@dataclass(frozen=True, kw_only=True)
class AudioModel:
    """Audio of a model."""

    form: AudioFormat
    positions: int
    """Hidden states of the encoder, which cross-attention sees."""
    rules: TranscriptRules
    alignment: Alignment | None
    """None if the model has no times of tokens."""
    build: Callable[[], AudioEncoder]
    """Makes the encoder on torch's default device, without loaded weights."""


def load_encoder(model: AudioModel, directory: Path, dtype: torch.dtype, device: torch.device) -> AudioEncoder:
    """Return the encoder with the weights of a checkpoint. Raise ModelError for one that does not fit."""
    with torch.device("meta"):
        built = model.build().to(dtype).eval()
    built.to_empty(device=device).requires_grad_(False)
    files = {path: read_header(path) for path in weight_files(directory)}
    own = {
        path: {name: tensor for stored, tensor in header.items() if (name := _name_here(stored))}
        for path, header in files.items()
    }
    targets = checkpoint_tensors(built.encoder)
    check_fit(directory, {name: place.stored_shape for name, place in targets.items()}, own)
    fill(own, targets, LoadProgress(None, own))
    return built


def _name_here(stored: str) -> str:
    """Return the name of a stored tensor in the encoder; empty for those of other parts."""
    return next((stored.removeprefix(part) for part in _PARTS if stored.startswith(part)), "")
