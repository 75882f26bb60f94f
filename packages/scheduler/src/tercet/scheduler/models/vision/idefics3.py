"""Images of Idefics3 and SmolVLM: square tiles, each after a text that names its place, and a thumbnail."""

import math
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tercet.protocol.messages.media import EdgeTiles, ImageFormat, TileTexts
from tercet.scheduler.architectures import named_architecture
from tercet.scheduler.model_files import ModelError, read_json
from tercet.scheduler.models.vision.image_model import ImageModel, VisionTower, tiles_of
from tercet.scheduler.models.vision.processor import (
    FILE,
    Normalization,
    check_token_texts,
    image_token,
    normalization_of,
    read_processor,
    resample_of,
    side_of,
)

_TOKEN = 128_257
_AROUND = "<fake_token_around_image>"
_THUMBNAIL = f"{_AROUND}<global-img>"
_TILES = TileTexts(
    tile=f"{_AROUND}<row_{{row}}_col_{{column}}>",
    row_break="\n",
    thumbnail=f"\n\n{_THUMBNAIL}",
)
_MOST_PIXELS = 4096
"""Maximum longest edge. transformers makes images smaller after they were resized to more."""
_LANCZOS = 1
_HALF = [0.5] * 3
_CONFIGS = ("vision_config", "text_config", "scale_factor")
_NAMES = {"vision_model.": "vision_model.", "connector.": "connector."}


class _Tower(VisionTower):
    def __init__(self, normalization: Normalization, vision_model: nn.Module, connector: nn.Module) -> None:
        super().__init__(normalization)
        self.vision_model = vision_model
        self.connector = connector

    def forward(self, array: torch.Tensor) -> torch.Tensor:
        """See `VisionTower`. Tiles are encoded side by side."""
        tiles = tiles_of(self.pixels(array))
        states = self.vision_model(pixel_values=tiles, return_dict=True).last_hidden_state
        embeddings: torch.Tensor = self.connector(states)
        return embeddings.flatten(0, 1)


def image_model(directory: Path) -> ImageModel | None:
    """Return the images of the model in a directory; None for its text model alone.

    Raise ModelError for a size or an option that is not supported.
    """
    if (processor := read_processor(directory, {"do_image_splitting": True})) is None:
        return None
    config = read_json(directory / "config.json")
    form = _form(directory, config, processor)
    return ImageModel(form=form, whole=False, build=partial(_build, config, processor), names=_NAMES)


def _form(directory: Path, config: Mapping[str, Any], processor: Mapping[str, Any]) -> ImageFormat:
    tile, patch = (side_of(config["vision_config"], *each) for each in (("image_size", 224), ("patch_size", 32)))
    patch *= config.get("scale_factor") or 2
    edge = _edge(processor, "size", 4 * 364)
    if (shown := _edge(processor, "max_image_size", 364)) != tile:
        raise ModelError(f"{FILE}: max_image_size {shown} is not the image_size {tile} of config.json")
    token_id, token = image_token(directory, config, _TOKEN)
    check_token_texts(directory, [_AROUND])
    side, tokens = math.ceil(edge / tile), (tile // patch) ** 2
    texts = len(_TILES.tile.format(row=side, column=side)) + len(_TILES.row_break)
    return ImageFormat(
        size=EdgeTiles(tile=tile, longest_edge=edge),
        patch=patch,
        resample=resample_of(processor, _LANCZOS),
        marker=token,
        prefix=_THUMBNAIL,
        token=token,
        suffix=_AROUND,
        token_id=token_id,
        max_tokens=(side**2 + 1) * tokens + side**2 * texts + len(_TILES.thumbnail),
        tiles=_TILES,
    )


def _edge(processor: Mapping[str, Any], name: str, usual: int) -> int:
    size = processor.get(name) or {"longest_edge": usual}
    edge = size.get("longest_edge")
    if type(edge) is not int or not 0 < edge <= _MOST_PIXELS:
        raise ModelError(f"{FILE}: {name} {size} is not supported, only a longest_edge of at most {_MOST_PIXELS}")
    return edge


def _build(config: Mapping[str, Any], processor: Mapping[str, Any]) -> VisionTower:
    import transformers
    from transformers.models.idefics3.modeling_idefics3 import Idefics3Connector
    from transformers.models.smolvlm.modeling_smolvlm import SmolVLMConnector

    given = {name: config[name] for name in _CONFIGS if name in config}
    known: Any
    if named_architecture(config).startswith("Idefics3"):
        known, connector = transformers.Idefics3Config(**given), Idefics3Connector
    else:
        known, connector = transformers.SmolVLMConfig(**given), SmolVLMConnector
    tower = transformers.AutoModel.from_config(known.vision_config)
    return _Tower(normalization_of(processor, _HALF, _HALF), tower, connector(known))
