"""Images of Llama 4: square tiles of a canvas and a thumbnail, whose patches are merged by fours."""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tercet.protocol.messages.media import CanvasTiles, ImageFormat, TileTexts
from tercet.scheduler.model_files import ModelError, read_json
from tercet.scheduler.models.vision.image_model import ImageModel, VisionTower, tiles_of
from tercet.scheduler.models.vision.processor import (
    FILE,
    Normalization,
    check_size,
    check_token_texts,
    image_token,
    normalization_of,
    read_processor,
    resample_of,
    side_of,
)

_TOKEN = 200_092
_MARKER, _BEGIN, _END = "<|image|>", "<|image_start|>", "<|image_end|>"
_COLUMN, _ROW = "<|tile_x_separator|>", "<|tile_y_separator|>"
_TILES = TileTexts(tile="", prefix=_BEGIN, column_break=_COLUMN, row_break=_ROW, thumbnail=_ROW + _MARKER)
_BILINEAR = 2
_HALF = [0.5] * 3
_CONFIGS = ("vision_config", "text_config")
_NAMES = {"vision_model.": "vision_model.", "multi_modal_projector.": "multi_modal_projector."}


class _Tower(VisionTower):
    """Tower that encodes tiles side by side."""

    def __init__(self, normalization: Normalization, vision_model: nn.Module, projector: nn.Module) -> None:
        super().__init__(normalization)
        self.vision_model = vision_model
        self.multi_modal_projector = projector

    def pixels(self, array: torch.Tensor) -> torch.Tensor:
        """See `VisionTower`. They are rounded to bfloat16 after each operation, as by transformers' processor."""
        parameter = next(self.parameters())
        scaled = array.permute(2, 0, 1).bfloat16() * self._factor
        return ((scaled - self._mean.bfloat16()) / self._std.bfloat16()).to(parameter.device, parameter.dtype)

    def forward(self, array: torch.Tensor) -> torch.Tensor:
        """See `VisionTower`."""
        states = self.vision_model(pixel_values=tiles_of(self.pixels(array)), return_dict=True).last_hidden_state
        embeddings: torch.Tensor = self.multi_modal_projector(states)
        return embeddings.flatten(0, 1)


def image_model(directory: Path) -> ImageModel | None:
    """Return the images of the model in a directory; None for its text model alone.

    Raise ModelError for a size or an option that is not supported.
    """
    if (processor := read_processor(directory, {"resize_to_max_canvas": False})) is None:
        return None
    config = read_json(directory / "config.json")
    form, build = _form(directory, config, processor), partial(_build, config, processor)
    return ImageModel(form=form, whole=False, build=build, names=_NAMES)


def _form(directory: Path, config: Mapping[str, Any], processor: Mapping[str, Any]) -> ImageFormat:
    vision = config["vision_config"]
    tile, patch = side_of(vision, "image_size", 448), side_of(vision, "patch_size", 14)
    check_size(processor, tile)
    ratio = vision.get("pixel_shuffle_ratio") or 0.5
    if ratio not in (1, 0.5, 0.25) or tile % patch or tile // patch % round(1 / ratio):
        raise ModelError(f"config.json: pixel_shuffle_ratio: {ratio!r} is not supported for {tile} pixels")
    most = processor.get("max_patches") or 16
    if type(most) is not int or not 0 < most <= 64:
        raise ModelError(f"{FILE}: max_patches {most!r} is not supported")
    patch = round(patch / ratio)
    token_id, token = image_token(directory, config, _TOKEN)
    check_token_texts(directory, [_MARKER, _BEGIN, _END, _COLUMN, _ROW])
    return ImageFormat(
        size=CanvasTiles(tile=tile, max_tiles=most),
        patch=patch,
        resample=resample_of(processor, _BILINEAR),
        marker=_MARKER,
        prefix=_BEGIN + _MARKER,
        token=token,
        suffix=_END,
        token_id=token_id,
        max_tokens=(most + 1) * ((tile // patch) ** 2 + 1),
        tiles=_TILES,
    )


def _build(config: Mapping[str, Any], processor: Mapping[str, Any]) -> VisionTower:
    from transformers import Llama4Config, Llama4VisionModel
    from transformers.models.llama4.modeling_llama4 import Llama4MultiModalProjector

    known: Any = Llama4Config(**{name: config[name] for name in _CONFIGS if name in config})
    tower = Llama4VisionModel._from_config(known.vision_config)
    return _Tower(normalization_of(processor, _HALF, _HALF), tower, Llama4MultiModalProjector(known))
