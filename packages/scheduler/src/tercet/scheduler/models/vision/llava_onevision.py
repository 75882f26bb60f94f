"""Images of LLaVA-OneVision: tiles at any resolution, or one square of each image of several."""

import re
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from tercet.protocol.messages.any_resolution import AnyResolution, PaddedSquare
from tercet.protocol.messages.media import ImageFormat
from tercet.scheduler.model_files import ModelError, read_json
from tercet.scheduler.models.vision.image_model import ImageModel, VisionTower, tiles_of
from tercet.scheduler.models.vision.processor import (
    BICUBIC,
    CLIP_MEAN,
    CLIP_STD,
    FILE,
    check_size,
    image_token,
    normalization_of,
    read_processor,
    resample_of,
    side_of,
)
from tercet.scheduler.models.vision.projected_tower import NAMES, ProjectedTower, layers_of

_TOKEN = 151_646
_SIDES = range(384, 2305, 384)
_SIZES = [[height, width] for height in _SIDES for width in _SIDES]
_MOST_TILES = 37
"""Tiles of the largest size of published checkpoints and of the whole image."""
_CONFIGS = (
    *("vision_config", "text_config", "multimodal_projector_bias", "projector_hidden_act"),
    "vision_feature_layer",
)


class _Tower(ProjectedTower):
    """Tower of tiles. A learned embedding ends each row of embeddings, or the embeddings of a single tile."""

    def __init__(self, *args: Any, newline: nn.Parameter, size: AnyResolution, side: int) -> None:
        super().__init__(*args)
        self.image_newline = newline
        self._size, self._side = size, side

    def forward(self, array: torch.Tensor, *original: int) -> torch.Tensor:
        """See `VisionTower`. An image of several has no original size."""
        embeddings: torch.Tensor = self.multi_modal_projector(self.states(tiles_of(self.pixels(array))))
        if not original:
            return torch.cat([embeddings[0], self.image_newline[None]])
        height, width = original
        inner = self._inner(embeddings[1:], height, width)
        kept = self._size.kept(height, width, self._side)
        if inner.shape[1:] != kept:
            [inner] = F.interpolate(inner[None], kept, mode="bilinear")
        newlines = self.image_newline[:, None, None].expand(-1, kept[0], 1)
        return torch.cat([embeddings[0], torch.cat([inner, newlines], 2).flatten(1).T])

    def _inner(self, tiles: torch.Tensor, height: int, width: int) -> torch.Tensor:
        """Join the embeddings [tiles, side * side, hidden] of an image.

        Return those inside its margins, [hidden, rows, columns].
        """
        rows, columns = self._size.grid(height, width)
        joined = tiles.view(rows, columns, self._side, self._side, -1).permute(4, 0, 2, 1, 3)
        joined = joined.flatten(1, 2).flatten(2, 3)
        inner = self._size.inner(height, width, self._side)
        top, left = ((whole - part) // 2 for whole, part in zip(joined.shape[1:], inner, strict=True))
        return joined[:, top : top + inner[0], left : left + inner[1]]


def image_model(directory: Path) -> ImageModel | None:
    """Return the images of the model in a directory; None for its text model alone.

    Raise ModelError for a size or an option that is not supported.
    """
    if (processor := read_processor(directory, {"do_center_crop": False})) is None:
        return None
    config = read_json(directory / "config.json")
    if (strategy := config.get("vision_feature_select_strategy") or "full") != "full":
        raise ModelError(f"config.json: vision_feature_select_strategy: {strategy!r} is not supported, only 'full'")
    size = _size(config, processor)
    patch = side_of(config["vision_config"], "patch_size", 14)
    build = partial(_build, config, processor, layers_of(config, -1), size, size.tile // patch)
    names = {**NAMES, "image_newline": "image_newline"}
    return ImageModel(form=_form(directory, config, processor, size, patch), whole=False, build=build, names=names)


def _size(config: Mapping[str, Any], processor: Mapping[str, Any]) -> AnyResolution:
    tile = side_of(config["vision_config"], "image_size", 384)
    check_size(processor, tile)
    ratio = config.get("vision_aspect_ratio") or "anyres_max_9"
    if (most := re.fullmatch(r"anyres_max_(\d{1,4})", str(ratio))) is None or not int(most[1]):
        raise ModelError(f"config.json: vision_aspect_ratio: {ratio!r} is not supported, only anyres_max_N")
    sizes = config.get("image_grid_pinpoints") or _SIZES
    if sizes != (processor.get("image_grid_pinpoints") or _SIZES):
        raise ModelError(f"{FILE}: image_grid_pinpoints are not those of config.json")
    if not isinstance(sizes, list) or not all(_is_size(each, tile) for each in sizes):
        raise ModelError(f"config.json: image_grid_pinpoints: heights and widths must be multiples of {tile}")
    return AnyResolution(tile=tile, sizes=tuple((each[0], each[1]) for each in sizes), max_tiles=int(most[1]))


def _is_size(size: Any, tile: int) -> bool:
    """Return whether a value is a pair of multiples of `tile`, and no more tiles than those of known models."""
    if not isinstance(size, list) or len(size) != 2 or any(type(each) is not int for each in size):
        return False
    height, width = size
    return bool(min(size) > 0 and height % tile == 0 == width % tile and height * width < _MOST_TILES * tile**2)


def _form(
    directory: Path, config: Mapping[str, Any], processor: Mapping[str, Any], size: AnyResolution, patch: int
) -> ImageFormat:
    token_id, token = image_token(directory, config, _TOKEN)
    red, green, blue = (int(255 * mean) for mean in processor.get("image_mean") or CLIP_MEAN)
    return ImageFormat(
        size=size,
        several=PaddedSquare(side=size.tile, background=(red, green, blue)),
        patch=patch,
        resample=resample_of(processor, BICUBIC),
        marker=token,
        token=token,
        token_id=token_id,
        max_tokens=size.most_embeddings(size.tile // patch),
    )


def _build(
    config: Mapping[str, Any],
    processor: Mapping[str, Any],
    layers: int | list[int],
    size: AnyResolution,
    side: int,
) -> VisionTower:
    from transformers import AutoModel, LlavaOnevisionConfig
    from transformers.models.llava_onevision.modeling_llava_onevision import LlavaOnevisionMultiModalProjector

    known: Any = LlavaOnevisionConfig(**{name: config[name] for name in _CONFIGS if name in config})
    return _Tower(
        normalization_of(processor, CLIP_MEAN, CLIP_STD),
        AutoModel.from_config(known.vision_config),
        LlavaOnevisionMultiModalProjector(known),
        layers,
        newline=nn.Parameter(torch.empty(known.text_config.hidden_size)),
        size=size,
        side=side,
    )
