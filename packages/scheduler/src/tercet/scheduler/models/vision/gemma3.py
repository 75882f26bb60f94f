"""Images of Gemma 3: SigLIP, average pooling and a projection. The tokens of an image see each other."""

import math
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from tercet.protocol.messages.media import FixedSize, ImageFormat
from tercet.scheduler.model_files import read_json
from tercet.scheduler.models.vision.image_model import ImageModel, VisionTower
from tercet.scheduler.models.vision.processor import (
    check_size,
    normalization_of,
    read_processor,
    resample_of,
    side_of,
    token_texts,
)
from tercet.scheduler.models.vision.projected_tower import NAMES, ProjectedTower

_TOKENS = {"boi_token_index": 255_999, "eoi_token_index": 256_000, "image_token_index": 262_144}
"""Ids of the tokens before, after and in the place of an image, where config.json does not say them."""
_CONFIGS = ("vision_config", "text_config", "mm_tokens_per_image")
_BILINEAR = 2
_HALF = [0.5] * 3


def image_model(directory: Path) -> ImageModel | None:
    """Return the images of the model in a directory; None for its text model alone.

    Raise ModelError for a size or an option that is not supported.
    """
    if (processor := read_processor(directory, {"do_pan_and_scan": False})) is None:
        return None
    config = read_json(directory / "config.json")
    return ImageModel(
        form=_form(directory, config, processor), whole=True, build=partial(_build, config, processor), names=NAMES
    )


def _form(directory: Path, config: Mapping[str, Any], processor: Mapping[str, Any]) -> ImageFormat:
    size, tokens = side_of(config["vision_config"], "image_size", 224), config.get("mm_tokens_per_image") or 256
    check_size(processor, size)
    ids = [config.get(name) or config.get(name.replace("_index", "_id")) or usual for name, usual in _TOKENS.items()]
    begin, end, image = token_texts(directory, ids)
    return ImageFormat(
        size=FixedSize(height=size, width=size),
        patch=size // math.isqrt(tokens),
        resample=resample_of(processor, _BILINEAR),
        marker=begin,
        prefix=f"\n\n{begin}",
        token=image,
        token_id=ids[2],
        suffix=f"{end}\n\n",
        max_tokens=tokens,
    )


def _build(config: Mapping[str, Any], processor: Mapping[str, Any]) -> VisionTower:
    from transformers import AutoModel, Gemma3Config
    from transformers.models.gemma3.modeling_gemma3 import Gemma3MultiModalProjector

    known = Gemma3Config(**{name: config[name] for name in _CONFIGS if name in config})
    tower, projector = AutoModel.from_config(known.vision_config), Gemma3MultiModalProjector(known)
    return ProjectedTower(normalization_of(processor, _HALF, _HALF), tower, projector, None)
