"""Images of LLaVA: CLIP or SigLIP in one size, or Pixtral in many."""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from tercet.protocol.messages.media import CenterCrop, FixedSize, ImageFormat
from tercet.scheduler.model_files import ModelError, read_json
from tercet.scheduler.models.vision import pixtral
from tercet.scheduler.models.vision.image_model import ImageModel, VisionTower
from tercet.scheduler.models.vision.processor import (
    BICUBIC,
    CLIP_MEAN,
    CLIP_STD,
    FILE,
    image_token,
    normalization_of,
    read_processor,
    resample_of,
    side_of,
)
from tercet.scheduler.models.vision.projected_tower import NAMES, ProjectedTower, layers_of

_TOKEN = 32_000
_CLIP, _SIGLIP, _PIXTRAL = "clip_vision_model", "siglip_vision_model", "pixtral"
_STRATEGIES = {_CLIP: "default", _SIGLIP: "full", _PIXTRAL: "full"}
"""Values of `vision_feature_select_strategy` that leave one state for each patch: CLIP has one more, the first."""
_CONFIGS = (
    *("vision_config", "text_config", "multimodal_projector_bias", "projector_hidden_act"),
    "vision_feature_layer",
)


def image_model(directory: Path) -> ImageModel | None:
    """Return the images of the model in a directory; None for its text model alone.

    Raise ModelError for a tower, a size or an option that is not supported.
    """
    config = read_json(directory / "config.json")
    vision = config.get("vision_config")
    kind = vision.get("model_type") or _CLIP if isinstance(vision, dict) else _CLIP
    usual = pixtral.USUAL if kind == _PIXTRAL else {"do_pad": False}
    if (processor := read_processor(directory, usual)) is None:
        return None
    if kind not in _STRATEGIES:
        raise ModelError(f"config.json: vision_config.model_type: {kind!r} is not one of {', '.join(_STRATEGIES)}")
    strategy = config.get("vision_feature_select_strategy") or "default"
    if strategy != _STRATEGIES[kind]:
        raise ModelError(f"config.json: vision_feature_select_strategy: {strategy!r} is not supported with {kind}")
    if kind == _PIXTRAL:
        form = pixtral.form_of(directory, config, processor, usual_token=_TOKEN)
    else:
        form = _form(directory, config, processor)
    build = partial(_build, config, processor, layers_of(config, -2), skipped=int(strategy == "default"))
    return ImageModel(form=form, whole=False, build=build, names=NAMES)


def _form(directory: Path, config: Mapping[str, Any], processor: Mapping[str, Any]) -> ImageFormat:
    patch = side_of(config["vision_config"], "patch_size", 14)
    size = _size(processor)
    side = side_of(config["vision_config"], "image_size", 336)
    if (size.height, size.width) != (side, side):
        raise ModelError(f"{FILE}: images of {size.height} x {size.width} pixels are not of image_size {side}")
    token_id, token = image_token(directory, config, _TOKEN)
    return ImageFormat(
        size=size,
        patch=patch,
        resample=resample_of(processor, BICUBIC),
        marker=token,
        token=token,
        token_id=token_id,
        max_tokens=(side // patch) ** 2,
    )


def _size(processor: Mapping[str, Any]) -> FixedSize | CenterCrop:
    """Return the size of a processor that may crop the center. In old files a side is a number without a name."""
    size, crop = processor.get("size") or {"shortest_edge": 224}, processor.get("crop_size") or 224
    size = {"shortest_edge": size} if isinstance(size, int) else size
    crop = {"height": crop, "width": crop} if isinstance(crop, int) else crop
    if "shortest_edge" in size and processor.get("do_center_crop", True):
        return CenterCrop(shortest_edge=size["shortest_edge"], height=crop["height"], width=crop["width"])
    if "height" in size and "width" in size and not processor.get("do_center_crop"):
        return FixedSize(height=size["height"], width=size["width"])
    raise ModelError(f"{FILE}: size {size} with do_center_crop {processor.get('do_center_crop')} is not supported")


def _build(
    config: Mapping[str, Any], processor: Mapping[str, Any], layers: int | list[int], *, skipped: int
) -> VisionTower:
    from transformers import AutoModel, LlavaConfig
    from transformers.models.llava.modeling_llava import LlavaMultiModalProjector

    known = LlavaConfig(**{name: config[name] for name in _CONFIGS if name in config})
    half = [0.5] * 3
    usual = (half, half) if config["vision_config"].get("model_type") == _SIGLIP else (CLIP_MEAN, CLIP_STD)
    return ProjectedTower(
        normalization_of(processor, *usual),
        AutoModel.from_config(known.vision_config),
        LlavaMultiModalProjector(known),
        layers,
        skipped,
    )
