"""Sounds in prompts of a model that hears: their samples, and the tower that encodes them as if they were images."""

from typing import NamedTuple

import numpy as np
import torch

from tercet.protocol.messages.codec import Frame
from tercet.scheduler.core.images import PlannedImage
from tercet.scheduler.executor.media.images import ArrayStore
from tercet.scheduler.executor.media.shared_embeddings import Embeddings
from tercet.scheduler.models.audio.audio_model import Samples
from tercet.scheduler.models.audio.sound_model import SoundModel, SoundTower

MOST_SAMPLE_BYTES = 1 << 30
"""Samples of all held requests; further requests are refused."""


class LoadedSounds(NamedTuple):
    """Sounds of a loaded model, and the tower that encodes them, which only rank 0 of several has."""

    model: SoundModel
    tower: SoundTower | None
    shared: Embeddings | None = None
    """With several ranks."""

    @property
    def excess_tokens(self) -> int:
        """Return 0: a step may cut a sound."""
        return 0

    @torch.inference_mode()
    def encode_blank(self) -> None:
        """Encode the longest sound that the encoder sees at once, for the memory that this takes."""
        form = self.model.form
        if self.tower is not None:
            self.tower(np.zeros(form.window or form.samples, np.int16))


class SoundStore(ArrayStore[Samples]):
    """Samples of the sounds of requests."""

    def __init__(self, most_bytes: int = MOST_SAMPLE_BYTES) -> None:
        super().__init__("sounds", most_bytes)

    def array(self, image: PlannedImage) -> Samples:
        """Return the samples of a sound. Raise KeyError if they were never added or are dropped."""
        return samples_array(self.frame(image.sha256))


def samples_array(frame: Frame) -> Samples:
    """Return the samples of a sound that arrived as a frame."""
    return np.frombuffer(frame, "<i2").astype(np.int16)
