"""Images of InternVL: square tiles and a thumbnail, each encoded by itself, whose patches are merged by fours."""

import math
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

from tercet.protocol.messages.media import AspectTiles, ImageFormat
from tercet.scheduler.model_files import ModelError, read_json
from tercet.scheduler.models.vision.image_model import ImageModel, VisionTower, tiles_of
from tercet.scheduler.models.vision.processor import (
    BICUBIC,
    CLIP_MEAN,
    CLIP_STD,
    check_size,
    check_token_texts,
    image_token,
    normalization_of,
    read_processor,
    resample_of,
    side_of,
)
from tercet.scheduler.models.vision.projected_tower import NAMES, ProjectedTower, layers_of

_TOKEN = 151_667
_BEGIN, _END = "<img>", "</img>"
_CONFIGS = ("vision_config", "text_config", "downsample_ratio", "projector_hidden_act")


class _Tower(ProjectedTower):
    """Tower that encodes tiles side by side and joins squares of `factor` x `factor` neighboring patches."""

    def __init__(self, *args: Any, factor: int) -> None:
        super().__init__(*args)
        self._factor_of_sides = factor

    def forward(self, array: torch.Tensor) -> torch.Tensor:
        """See `VisionTower`."""
        states = self.states(tiles_of(self.pixels(array)))
        embeddings: torch.Tensor = self.multi_modal_projector(_joined(states, self._factor_of_sides))
        return embeddings.flatten(0, 1)


def _joined(states: torch.Tensor, factor: int) -> torch.Tensor:
    """Join the states [tiles, patches, size] of squares of neighbors, in the order of InternVL's pixel shuffle."""
    tiles, patches, size = states.shape
    side, short = math.isqrt(patches), math.isqrt(patches) // factor
    columns = states.reshape(tiles, side, short, size * factor).transpose(1, 2)
    joined = columns.reshape(tiles, short, short, size * factor**2)
    return joined.transpose(1, 2).flatten(1, 2)


def image_model(directory: Path) -> ImageModel | None:
    """Return the images of the model in a directory; None for its text model alone.

    Raise ModelError for a size or an option that is not supported.
    """
    if (processor := read_processor(directory)) is None:
        return None
    config = read_json(directory / "config.json")
    layer = layers_of(config, -1)
    if not isinstance(layer, int):
        raise ModelError(f"config.json: vision_feature_layer: {layer!r} is not supported, only one layer")
    if (strategy := config.get("vision_feature_select_strategy") or "default") != "default":
        raise ModelError(f"config.json: vision_feature_select_strategy: {strategy!r} is not supported, only 'default'")
    factor = round(1 / (config.get("downsample_ratio") or 0.5))
    build = partial(_build, config, processor, layer, factor)
    return ImageModel(form=_form(directory, config, processor, factor), whole=False, build=build, names=NAMES)


def _form(directory: Path, config: Mapping[str, Any], processor: Mapping[str, Any], factor: int) -> ImageFormat:
    tile, patch = (side_of(config["vision_config"], *each) for each in (("image_size", 448), ("patch_size", 14)))
    check_size(processor, tile)
    tokens = (tile // (patch * factor)) ** 2
    if (wanted := config.get("image_seq_length") or 256) != tokens:
        raise ModelError(f"config.json: image_seq_length: a tile has {tokens} embeddings and not {wanted}")
    least, most = processor.get("min_patches") or 1, processor.get("max_patches") or 12
    token_id, token = image_token(directory, config, _TOKEN)
    check_token_texts(directory, [_BEGIN, _END])
    return ImageFormat(
        size=AspectTiles(tile=tile, min_tiles=least, max_tiles=most),
        patch=patch * factor,
        resample=resample_of(processor, BICUBIC),
        marker=token,
        prefix=_BEGIN,
        token=token,
        suffix=_END,
        token_id=token_id,
        max_tokens=(most + 1) * tokens,
    )


def _build(config: Mapping[str, Any], processor: Mapping[str, Any], layer: int, factor: int) -> VisionTower:
    from transformers import AutoModel, InternVLConfig
    from transformers.models.internvl.modeling_internvl import InternVLMultiModalProjector

    known = InternVLConfig(**{name: config[name] for name in _CONFIGS if name in config})
    return _Tower(
        normalization_of(processor, CLIP_MEAN, CLIP_STD),
        AutoModel.from_config(known.vision_config),
        InternVLMultiModalProjector(known),
        None if layer == -1 else layer,
        1,
        factor=factor,
    )
