"""Images of Gemma 4: patches with positions in two dimensions, pooled by squares, and a projection.

In its larger models the tokens of an image see each other, in layers with a sliding window alone.
"""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tercet.protocol.messages.media import FilledPixels, ImageFormat
from tercet.scheduler.model_files import ModelError, read_json
from tercet.scheduler.models.vision.image_model import ImageModel, VisionTower
from tercet.scheduler.models.vision.processor import (
    BICUBIC,
    FILE,
    Normalization,
    normalization_of,
    read_processor,
    resample_of,
    token_texts,
)

_TOKENS = {"boi_token_id": 255_999, "eoi_token_id": 258_882, "image_token_id": 258_880}
"""Ids of the tokens before, after and in the place of an image, where config.json does not say them."""
_SIZES = {"patch_size": 16, "pooling_kernel_size": 3}
"""Fields of the processor that `vision_config` has, too, and their defaults."""
_MOST_TOKENS = 280
_COUNTS = (70, 140, 280, 560, 1120)
"""Maximum tokens of an image that the processor takes."""


class Gemma4Tower(VisionTower):
    """A tower whose embeddings are projected to the text model's size."""

    def __init__(self, normalization: Normalization, tower: nn.Module, embedder: nn.Module, patch: int) -> None:
        super().__init__(normalization)
        self.vision_tower = tower
        self.embed_vision = embedder
        self._patch = patch

    def forward(self, array: torch.Tensor) -> torch.Tensor:
        """See `VisionTower`."""
        patches, positions = self.patches(array)
        states = self.vision_tower(pixel_values=patches[None], pixel_position_ids=positions[None]).last_hidden_state
        embeddings: torch.Tensor = self.embed_vision(inputs_embeds=states)
        return embeddings

    def patches(self, array: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return an image's patches [patches, pixels * channels], and their columns and rows int64 [patches, 2]."""
        pixels, patch = self.pixels(array), self._patch
        rows, columns = pixels.shape[1] // patch, pixels.shape[2] // patch
        squares = pixels.view(3, rows, patch, columns, patch).permute(1, 3, 2, 4, 0)
        place = torch.cartesian_prod(*(torch.arange(count, device=pixels.device) for count in (rows, columns)))
        return squares.reshape(rows * columns, -1), place.view(-1, 2).flip(1)


def image_model(directory: Path) -> ImageModel | None:
    """Return the images of the model in a directory; None for its text model alone.

    Raise ModelError for a size or an option that is not supported.
    """
    if (processor := read_processor(directory, {"do_normalize": False})) is None:
        return None
    config = read_json(directory / "config.json")
    whole = (config.get("text_config") or {}).get("use_bidirectional_attention") == "vision"
    sizes = {name: processor.get(name) or usual for name, usual in _SIZES.items()}
    for name, usual in _SIZES.items():
        if sizes[name] != (wanted := config["vision_config"].get(name) or usual):
            raise ModelError(f"{FILE}: {name} {sizes[name]} is not the one of config.json, {wanted}")
    tokens = processor.get("max_soft_tokens") or _MOST_TOKENS
    if tokens not in _COUNTS:
        raise ModelError(f"{FILE}: max_soft_tokens {tokens} is not one of {', '.join(map(str, _COUNTS))}")
    return ImageModel(
        form=_form(directory, config, processor, sizes["patch_size"] * sizes["pooling_kernel_size"], tokens),
        whole=whole,
        in_windows=whole,
        build=partial(_build, config, processor, sizes["patch_size"]),
        names={"vision_tower.": "vision_tower.", "embed_vision.": "embed_vision."},
    )


def _form(
    directory: Path, config: Mapping[str, Any], processor: Mapping[str, Any], patch: int, tokens: int
) -> ImageFormat:
    begin, end, image = token_texts(directory, [config.get(name) or usual for name, usual in _TOKENS.items()])
    return ImageFormat(
        size=FilledPixels(max_pixels=tokens * patch**2),
        patch=patch,
        resample=resample_of(processor, BICUBIC),
        marker=image,
        prefix=begin,
        token=image,
        token_id=config.get("image_token_id") or _TOKENS["image_token_id"],
        suffix=end,
        max_tokens=tokens,
    )


def _build(config: Mapping[str, Any], processor: Mapping[str, Any], patch: int) -> VisionTower:
    from transformers import AutoModel, Gemma4Config
    from transformers.models.gemma4.modeling_gemma4 import Gemma4MultimodalEmbedder

    known: Any = Gemma4Config(**{name: config[name] for name in ("vision_config", "text_config")})
    embedder = Gemma4MultimodalEmbedder(known.vision_config, known.text_config)
    normalization = normalization_of(processor, (0.0,) * 3, (1.0,) * 3)
    return Gemma4Tower(normalization, AutoModel.from_config(known.vision_config), embedder, patch)
