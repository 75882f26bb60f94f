"""The record of a model's images: their form, and the tower that makes embeddings of them."""

import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from msgspec import structs
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from tercet.protocol.messages.media import ImageFormat, PixelRange
from tercet.scheduler.model_files import ModelError, read_header, weight_files
from tercet.scheduler.models.vision.processor import Normalization
from tercet.scheduler.models.weights.tensor_files import open_tensors

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
        """Return embeddings [embeddings, hidden] of an array uint8 [height, width, 3] on the CPU."""
        raise NotImplementedError


def tiles_of(pixels: torch.Tensor) -> torch.Tensor:
    """Return the square tiles [tiles, 3, side, side] of pixels [3, tiles * side, side], one below another."""
    channels, height, side = pixels.shape
    return pixels.view(channels, height // side, side, side).transpose(0, 1)


@dataclass(frozen=True, kw_only=True)
class ImageModel:
    """Images of a model."""

    form: ImageFormat
    whole: bool
    """The tokens of an image see each other."""
    build: Callable[[], VisionTower]
    """Makes the tower on the CPU, without loaded weights."""
    names: Mapping[str, str]
    """Beginnings of the names of stored tensors, without transformers 5's `model.`, and of the tower's parameters. The
    first that fits counts."""

    def name_here(self, stored: str) -> str | None:
        """Return the name of a stored tensor in the tower; None for those of the text model."""
        name = stored.removeprefix("model.")
        for beginning, here in self.names.items():
            if name.startswith(beginning):
                return here + name.removeprefix(beginning)
        return None


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


def load_tower(model: ImageModel, directory: Path, dtype: torch.dtype, device: torch.device) -> VisionTower:
    """Return the tower with the weights of a checkpoint. Raise ModelError for one that lacks any."""
    with _parameters_on_meta():
        tower = model.build().eval()
    missing = {name for name, _ in tower.named_parameters()}
    buffers = {name: tensor for name, tensor in tower.state_dict().items() if name not in missing}
    for path in weight_files(directory):
        header = read_header(path)
        with open_tensors(path) as file:
            for stored in header:
                if (here := model.name_here(stored)) is None:
                    continue
                place = buffers[here] if here in buffers else tower.get_parameter(here) if here in missing else None
                if place is None or not _fits(header[stored].shape, place.shape):
                    raise ModelError(f"{directory}: the tensor {stored!r} does not fit the vision tower of config.json")
                if here in buffers:
                    place.copy_(file.get_tensor(stored).to(dtype))
                    continue
                missing.remove(here)
                _set(tower, here, file.get_tensor(stored), dtype)
    if missing:
        raise ModelError(f"{directory} lacks tensors of the vision tower: {', '.join(sorted(missing)[:8])}")
    return tower.to(device)


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Let modules have parameters without memory. Buffers are computed, because checkpoints do not store them all."""
    # torch takes the parameter that the hook returns, which its annotations do not say
    hook = register_module_parameter_registration_hook(_without_memory)  # type: ignore[arg-type]
    try:
        yield
    finally:
        hook.remove()


def _without_memory(_module: nn.Module, _name: str, parameter: nn.Parameter) -> nn.Parameter:
    return nn.Parameter(parameter.to("meta"), requires_grad=False)


def _fits(stored: Sequence[int], shape: Sequence[int]) -> bool:
    """Return whether a stored tensor is a parameter: also a convolution whose patches a linear layer gets flat."""
    flat = len(stored) > 2 and [stored[0], math.prod(stored[1:])] == [*shape]
    return flat or tuple(stored) == tuple(shape)


def _set(tower: nn.Module, name: str, stored: torch.Tensor, dtype: torch.dtype) -> None:
    path, _, last = name.rpartition(".")
    weight = torch.empty(tower.get_parameter(name).shape, dtype=dtype)
    weight.view(stored.shape).copy_(stored)
    setattr(tower.get_submodule(path), last, nn.Parameter(weight, requires_grad=False))
