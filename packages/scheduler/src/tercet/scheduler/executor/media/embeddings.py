"""Embeddings that frontends send in the place of arrays, to a scheduler of the language model alone."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from tercet.protocol.messages.codec import Frame
from tercet.protocol.messages.embedding_form import EmbeddingForm
from tercet.scheduler.core.images import Input, PlannedImage
from tercet.scheduler.core.plan import excess_tokens
from tercet.scheduler.executor.media.images import MOST_ARRAY_BYTES, ArrayStore
from tercet.scheduler.executor.media.shared_embeddings import Embeddings
from tercet.scheduler.model_files import model_identity
from tercet.scheduler.models.audio.sound_model import SoundModel
from tercet.scheduler.models.config.model_config import ModelConfig
from tercet.scheduler.models.vision.image_model import ImageModel


def embedding_form(
    model: ImageModel | SoundModel, config: ModelConfig, directory: Path, weights: Path | None
) -> EmbeddingForm:
    """Return the form of the embeddings of a model's images or sounds."""
    return EmbeddingForm(
        width=config.hidden_size * (1 + (model.deepstack if isinstance(model, ImageModel) else 0)),
        dtype=str(config.dtype).removeprefix("torch."),
        tower=model_identity(directory, "", weights=weights).weights,
        images=model.form if isinstance(model, ImageModel) else None,
        sounds=model.form if isinstance(model, SoundModel) else None,
        video=model.video if isinstance(model, ImageModel) else None,
    )


class LoadedEmbeddings(NamedTuple):
    """Images or sounds of a loaded model without its tower. Its place has a copy to the device, on rank 0 alone."""

    model: ImageModel | SoundModel
    form: EmbeddingForm
    tower: Callable[..., torch.Tensor] | None
    shared: Embeddings | None = None
    """With several ranks."""

    @property
    def excess_tokens(self) -> int:
        """Return the tokens by which a step may exceed its budget."""
        return excess_tokens(self.form.images, whole=self.model.whole)

    def encode_blank(self) -> None:
        """Do nothing: embeddings take no memory beside their cache."""


class EmbeddingStore(ArrayStore[torch.Tensor]):
    """Embeddings of the images or sounds of requests."""

    def __init__(self, form: EmbeddingForm, most_bytes: int = MOST_ARRAY_BYTES) -> None:
        super().__init__("embeddings", most_bytes)
        self.embeddings = self._form = form
        self._dtype: torch.dtype = getattr(torch, form.dtype)

    def add(self, images: Sequence[Input], frames: Sequence[Frame]) -> str:
        """Keep the embeddings of a request. Return a fault, or an empty text."""
        counts = [self._form.embeddings(each) for each in images]
        sizes = [self._form.frame_bytes(count) for count in counts]
        if not all(counts) or [memoryview(frame).nbytes for frame in frames] != sizes:
            return "the embeddings do not fit the images or sounds"
        return self.keep({each.sha256: frame for each, frame in zip(images, frames, strict=True)})

    def array(self, image: PlannedImage) -> torch.Tensor:
        """Return embeddings [embeddings, width]. Raise KeyError if they were never added or are dropped."""
        flat = torch.from_numpy(np.frombuffer(self.frame(image.sha256), np.uint8).copy())
        return flat.view(self._dtype).view(-1, self._form.width)
