"""Images of Gemma 3: SigLIP, average pooling and a projection. The tokens of an image see each other."""

import math
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

from tercet.protocol.messages.media import FixedSize, ImageFormat
from tercet.scheduler.model_files import ModelError, read_json, tokenizer_files
from tercet.scheduler.models.vision.image_model import ImageModel, VisionTower
from tercet.scheduler.tokenizer_files import added_token_texts

_TOKENS = {"boi_token_index": 255_999, "eoi_token_index": 256_000, "image_token_index": 262_144}
"""Ids of the tokens before, after and in the place of an image, where config.json does not say them."""
_FILE, _COMMON_FILE = "preprocessor_config.json", "processor_config.json"
_CONFIGS = ("vision_config", "text_config", "mm_tokens_per_image")
_BILINEAR = 2
_USUAL = {"do_resize": True, "do_rescale": True, "do_normalize": True, "do_pan_and_scan": False}


def image_model(directory: Path) -> ImageModel | None:
    """Return the images of the model in a directory; None for its text model alone.

    Raise ModelError for a size or an option that is not supported.
    """
    config = read_json(directory / "config.json")
    if not isinstance(config.get("vision_config"), dict) or (processor := _processor(directory)) is None:
        return None
    for name, usual in _USUAL.items():
        if processor.get(name) not in (usual, None):
            raise ModelError(f"{_FILE}: {name} {processor[name]!r} is not supported")
    return ImageModel(form=_form(directory, config, processor), whole=True, build=partial(_build, config, processor))


def _processor(directory: Path) -> dict[str, Any] | None:
    """Return the config of the image processor, which transformers 5 writes into a file with the tokenizer's."""
    if (directory / _FILE).is_file():
        return read_json(directory / _FILE)
    if not (directory / _COMMON_FILE).is_file():
        return None
    processor = read_json(directory / _COMMON_FILE).get("image_processor")
    return processor if isinstance(processor, dict) else None


def _form(directory: Path, config: Mapping[str, Any], processor: Mapping[str, Any]) -> ImageFormat:
    size, tokens = _size(config, processor), config.get("mm_tokens_per_image") or 256
    texts = added_token_texts(tokenizer_files(directory))
    ids = [config.get(name) or config.get(name.replace("_index", "_id")) or usual for name, usual in _TOKENS.items()]
    if lacking := [each for each in ids if each not in texts]:
        raise ModelError(f"tokenizer.json lacks the tokens of images, which are {lacking} in config.json")
    begin, end, image = map(texts.__getitem__, ids)
    return ImageFormat(
        size=FixedSize(height=size, width=size),
        patch=size // math.isqrt(tokens),
        resample=processor.get("resample") or _BILINEAR,
        marker=begin,
        prefix=f"\n\n{begin}",
        token=image,
        token_id=ids[2],
        suffix=f"{end}\n\n",
        max_tokens=tokens,
    )


def _size(config: Mapping[str, Any], processor: Mapping[str, Any]) -> int:
    wanted = config["vision_config"].get("image_size") or 224
    size = processor.get("size") or {}
    if (size.get("height"), size.get("width")) != (wanted, wanted):
        raise ModelError(f"{_FILE}: size {size} is not the image_size {wanted} of config.json")
    return int(wanted)


def _build(config: Mapping[str, Any], processor: Mapping[str, Any]) -> VisionTower:
    from transformers import AutoModel, Gemma3Config
    from transformers.models.gemma3.modeling_gemma3 import Gemma3MultiModalProjector

    known = Gemma3Config(**{name: config[name] for name in _CONFIGS if name in config})
    half = [0.5] * 3
    with torch.device("meta"):
        tower, projector = AutoModel.from_config(known.vision_config), Gemma3MultiModalProjector(known)
    return VisionTower(
        tower,
        projector,
        factor=processor.get("rescale_factor") or 1 / 255,
        mean=processor.get("image_mean") or half,
        std=processor.get("image_std") or half,
    )
