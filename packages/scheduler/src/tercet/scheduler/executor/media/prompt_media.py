"""Images or sounds in the prompts of a model: its tower, the arrays, and their steps."""

from typing import Any

import torch

from tercet.protocol.messages.media import ImageFormat
from tercet.scheduler.executor.media.embeddings import EmbeddingStore, LoadedEmbeddings
from tercet.scheduler.executor.media.image_positions import ImagePositions
from tercet.scheduler.executor.media.images import ArrayStore, ImageStore, LoadedImages, StepImages
from tercet.scheduler.executor.media.sounds import LoadedSounds, SoundStore
from tercet.scheduler.models.layers.layers import Rotary
from tercet.scheduler.models.vision.image_model import ImageModel

LoadedMedia = LoadedImages | LoadedSounds | LoadedEmbeddings


def array_store(loaded: LoadedMedia | None) -> ArrayStore[Any] | None:
    """Return an empty store of the arrays that a model takes; None if it takes none."""
    if loaded is None:
        return None
    if isinstance(loaded, LoadedEmbeddings):
        return EmbeddingStore(loaded.form)
    return ImageStore() if isinstance(loaded, LoadedImages) else SoundStore()


def step_images(
    loaded: LoadedMedia | None, rotary: Rotary | None, store: ArrayStore[Any] | None, device: torch.device
) -> StepImages[Any] | None:
    """Return the images or sounds of a model's steps; None if it takes none."""
    if loaded is None or store is None:
        return None
    form, positions = loaded.model.form, None
    video = loaded.model.video if isinstance(loaded.model, ImageModel) else None
    if isinstance(form, ImageFormat) and rotary is not None and rotary.parts is not None:
        positions = ImagePositions(rotary, form.patch, device)
    return StepImages(
        loaded.tower,
        store,
        form.token_id,
        device,
        whole=loaded.model.whole,
        in_windows=isinstance(loaded.model, ImageModel) and loaded.model.in_windows,
        group_id=None if video is None else video.token_id,
        positions=positions,
        largest=max(form.max_tokens, 0 if video is None else video.max_tokens),
        shared=loaded.shared,
    )
