"""The record of a model's images: their form, and the tower that makes embeddings of them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from tercet.protocol.messages.media import ImageFormat
from tercet.scheduler.model_files import ModelError, read_header, weight_files
from tercet.scheduler.models.weights.tensor_files import open_tensors

_PARTS = ("vision_tower.", "multi_modal_projector.")
"""Prefixes of the tower's tensors in checkpoints, by transformers 4. Transformers 5 writes `model.` before them."""


class VisionTower(nn.Module):
    """transformers' own modules: an encoder of patches, and a projection to the text model's embeddings."""

    def __init__(
        self,
        vision_tower: nn.Module,
        projector: nn.Module,
        *,
        factor: float,
        mean: Sequence[float],
        std: Sequence[float],
    ) -> None:
        """Create a tower. Pixels are multiplied by `factor`, then normalized by `mean` and `std` of each channel."""
        super().__init__()
        self.vision_tower = vision_tower
        self.multi_modal_projector = projector
        self._factor = factor
        self._mean, self._std = (torch.tensor(each, device="cpu").view(3, 1, 1) for each in (mean, std))

    def forward(self, array: torch.Tensor) -> torch.Tensor:
        """Return embeddings [tokens, hidden] of an array uint8 [height, width, 3] on the CPU."""
        parameter = next(self.multi_modal_projector.parameters())
        pixels = (array[None].permute(0, 3, 1, 2).double() * self._factor).float()
        pixels = ((pixels - self._mean) / self._std).to(parameter.device, parameter.dtype)
        states = self.vision_tower(pixel_values=pixels, return_dict=True).last_hidden_state
        embeddings: torch.Tensor = self.multi_modal_projector(states)
        return embeddings[0]


@dataclass(frozen=True, kw_only=True)
class ImageModel:
    """Images of a model."""

    form: ImageFormat
    whole: bool
    """The tokens of an image see each other."""
    build: Callable[[], VisionTower]
    """Makes the tower on torch's default device in its default dtype, without loaded weights."""


def load_tower(model: ImageModel, directory: Path, dtype: torch.dtype, device: torch.device) -> VisionTower:
    """Return the tower with the weights of a checkpoint. Raise ModelError for one that lacks any."""
    with torch.device("meta"):
        tower = model.build().to(dtype).eval()
    tower = tower.to_empty(device=device)
    for module in tower.modules():
        for name, buffer in module.named_buffers(recurse=False):
            if buffer.dtype == torch.int64:  # positions, which checkpoints do not store
                buffer.copy_(torch.arange(buffer.numel()).view_as(buffer))
            else:
                raise ModelError(f"{directory}: the vision tower has a buffer {name!r}, which is not known here")
    missing = dict(tower.named_parameters())
    for path in weight_files(directory):
        header = read_header(path)
        with open_tensors(path) as file:
            for stored in header:
                if (here := _name_here(stored)) is None:
                    continue
                parameter = missing.pop(here, None)
                if parameter is None or parameter.shape != header[stored].shape:
                    raise ModelError(f"{directory}: the tensor {stored!r} does not fit the vision tower of config.json")
                parameter.data.copy_(file.get_tensor(stored))
    if missing:
        raise ModelError(f"{directory} lacks tensors of the vision tower: {', '.join(sorted(missing)[:8])}")
    return tower.requires_grad_(False)


def _name_here(stored: str) -> str | None:
    """Return the name of a stored tensor in a `VisionTower`; None for those of the text model."""
    name = stored.removeprefix("model.")
    return name.replace(".vision_model.", ".") if name.startswith(_PARTS) else None
