"""Images of Mistral 3 and Pixtral: sizes near their own, with a token after each row of patches."""

import math
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

from tercet.protocol.messages.media import ImageFormat, LongestEdge
from tercet.scheduler.model_files import ModelError, read_json
from tercet.scheduler.models.vision.image_model import ImageModel, VisionTower
from tercet.scheduler.models.vision.processor import (
    BICUBIC,
    CLIP_MEAN,
    CLIP_STD,
    FILE,
    check_token_texts,
    image_token,
    normalization_of,
    read_processor,
    resample_of,
    side_of,
)
from tercet.scheduler.models.vision.projected_tower import NAMES, ProjectedTower, layers_of

USUAL = {"do_center_crop": False}
"""Options of the processor with the values that are supported."""
_BREAK, _END = "[IMG_BREAK]", "[IMG_END]"
_CONFIGS = (
    *("vision_config", "text_config", "multimodal_projector_bias", "projector_hidden_act"),
    *("spatial_merge_size", "vision_feature_layer"),
)


class _Tower(ProjectedTower):
    """Tower whose projector merges squares of neighboring patches, for which it needs the size of the image."""

    def forward(self, array: torch.Tensor) -> torch.Tensor:
        """See `VisionTower`."""
        [states] = self.states(self.pixels(array)[None])
        embeddings: torch.Tensor = self.multi_modal_projector(states, [tuple(array.shape[:2])])
        return embeddings


def image_model(directory: Path) -> ImageModel | None:
    """Return the images of the Mistral 3 in a directory; None for its text model alone.

    Raise ModelError for an option that is not supported.
    """
    if (processor := read_processor(directory, USUAL)) is None:
        return None
    config = read_json(directory / "config.json")
    form = form_of(directory, config, processor, usual_token=10, merged=config.get("spatial_merge_size", 2))
    build = partial(_build, config, processor, layers_of(config, -1))
    return ImageModel(form=form, whole=False, build=build, names=NAMES)


def form_of(
    directory: Path, config: Mapping[str, Any], processor: Mapping[str, Any], *, usual_token: int, merged: int = 1
) -> ImageFormat:
    """Return the form of images whose embeddings are of squares of `merged` patches.

    `usual_token` is the default of the placeholder token. Raise ModelError for a size that is not supported.
    """
    size = processor.get("size") or {"longest_edge": 1024}
    patch = merged * side_of(config["vision_config"], "patch_size", 16)
    edge = size.get("longest_edge") or (size.get("height") if size.get("height") == size.get("width") else None)
    if type(edge) is not int or edge < 1:
        raise ModelError(f"{FILE}: size {size} is not supported, only a longest_edge")
    token_id, token = image_token(directory, config, usual_token)
    check_token_texts(directory, [_BREAK, _END])
    side = math.ceil(edge / patch)
    return ImageFormat(
        size=LongestEdge(max_edge=edge),
        patch=patch,
        resample=resample_of(processor, BICUBIC),
        marker=token,
        token=token,
        token_id=token_id,
        row_break=_BREAK,
        suffix=_END,
        max_tokens=side * (side + 1) - 1,
    )


def _build(config: Mapping[str, Any], processor: Mapping[str, Any], layers: int | list[int]) -> VisionTower:
    from transformers import AutoModel, Mistral3Config
    from transformers.models.mistral3.modeling_mistral3 import Mistral3MultiModalProjector

    known = Mistral3Config(**{name: config[name] for name in _CONFIGS if name in config})
    return _Tower(
        normalization_of(processor, CLIP_MEAN, CLIP_STD),
        AutoModel.from_config(known.vision_config),
        Mistral3MultiModalProjector(known),
        layers,
    )
