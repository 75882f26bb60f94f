"""The record of a model's images: their form, and the tower that makes embeddings of them."""

import logging
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from msgspec import structs
from torch import nn

from tercet.protocol.messages.media import ImageFormat, PixelRange
from tercet.protocol.messages.video import VideoFormat
from tercet.scheduler.models.tower import TowerModel
from tercet.scheduler.models.vision.processor import Normalization

logger = logging.getLogger(__name__)

CPU_TOKENS = 2048
"""Maximum tokens of an image on a CPU, where attention among the patches of a larger one takes minutes."""


class VisionTower(nn.Module):
    """transformers' own modules, which a subclass has: images to embeddings of the text model's size."""

    def __init__(self, normalization: Normalization) -> None:
        super().__init__()
        self._factor = normalization.factor
        self._mean, self._std = (torch.tensor(each).view(3, 1, 1) for each in (normalization.mean, normalization.std))

    def pixels(self, array: torch.Tensor) -> torch.Tensor:
        """Return the normalized pixels [3, height, width] of an array, for the tower's parameters."""
        parameter = next(self.parameters())
        pixels = (array.permute(2, 0, 1).double() * self._factor).float()
        return ((pixels - self._mean) / self._std).to(parameter.device, parameter.dtype)

    def forward(self, array: torch.Tensor) -> torch.Tensor:
        """Return embeddings [embeddings, hidden] of an array uint8 on the CPU: [height, width, 3], or a group of
        frames, [frames, height, width, 3].

        A model whose embeddings depend on `ImageInput.original` gets its numbers, too.
        """
        raise NotImplementedError


def tiles_of(pixels: torch.Tensor) -> torch.Tensor:
    """Return the square tiles [tiles, 3, side, side] of pixels [3, tiles * side, side], one below another."""
    channels, height, side = pixels.shape
    return pixels.view(channels, height // side, side, side).transpose(0, 1)


@dataclass(frozen=True, kw_only=True)
class ImageModel(TowerModel[VisionTower]):
    """Images of a model."""

    noun: ClassVar[str] = "vision tower"
    form: ImageFormat
    whole: bool
    """The tokens of an image see each other."""
    in_windows: bool = False
    """They do so in layers with a sliding window alone."""
    deepstack: int = 0
    """Number of the first layers after which further embeddings are added."""
    video: VideoFormat | None = None
    """Form of clips; None if the model takes none."""


def bounded_for_cpu(model: ImageModel) -> ImageModel:
    """Return the model with images of at most `CPU_TOKENS`, which are scaled down."""
    form = model.form
    most = CPU_TOKENS * form.patch**2
    if not isinstance(form.size, PixelRange) or form.size.max_pixels <= most:
        return model
    logger.warning(
        "images are scaled down to %d pixels instead of %d: on a CPU larger ones take too long",
        most,
        form.size.max_pixels,
    )
    size = PixelRange(min_pixels=min(form.size.min_pixels, most), max_pixels=most)
    return replace(model, form=structs.replace(form, size=size))
