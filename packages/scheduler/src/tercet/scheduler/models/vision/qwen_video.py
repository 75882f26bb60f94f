"""Clips of Qwen2-VL and its successors: groups of frames, each encoded as an image is."""

import logging
import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from msgspec import structs

from tercet.protocol.messages.video import ClipPixels, FramePixels, FrameSampling, VideoFormat
from tercet.scheduler.model_files import ModelError, read_json
from tercet.scheduler.models.vision.image_model import CPU_TOKENS, ImageModel
from tercet.scheduler.models.vision.processor import (
    BICUBIC,
    CLIP_MEAN,
    CLIP_STD,
    normalization_of,
    resample_of,
    token_texts,
)

logger = logging.getLogger(__name__)

_FILES = (("processor_config.json", "video_processor"), ("video_preprocessor_config.json", None))
"""Files with the config of the video processor, and the field that has it; without one it is the image processor's."""
_VIDEO_TOKEN, _START_TOKEN, _END_TOKEN = 151_656, 151_652, 151_653
_PER_SECOND, _MIN_FRAMES, _MAX_FRAMES = 2.0, 4, 768
_LEAST_TOKENS, _MOST_TOKENS = 128, 768
_CONTEXT = 128_000
_SHARE = 0.9
"""Part of the context that one clip may take, as in Qwen's own tools."""
_MOST_BYTES = 192 << 20
"""Bytes of the arrays of a clip."""
_LONGEST = 200
"""Maximum ratio of the sides of an image or a frame."""


def most_tokens(least: float, most: float) -> int:
    """Return the maximum tokens of an image: of one with the most pixels, of the longest row, and of the longest image
    with the least pixels, whose sides are rounded up.
    """
    return max(int(most), _LONGEST, math.ceil(least + math.sqrt(least * _LONGEST) + math.sqrt(least / _LONGEST) + 1))


def video_format(
    directory: Path, config: Mapping[str, Any], images: Mapping[str, Any], sizes: Mapping[str, int]
) -> VideoFormat | None:
    """Return the form of the clips of a model in a directory; None, with a warning, if they are not supported."""
    processor = _processor(directory, images)
    same_patches = all((processor.get(name) or size) == size for name, size in sizes.items())
    if not same_patches or _numbers(processor) != _numbers(images):
        logger.warning("requests with video are refused: patches or normalization are not the image processor's")
        return None
    marks = [
        config.get(f"{name}_token_id") or usual
        for name, usual in (("video", _VIDEO_TOKEN), ("vision_start", _START_TOKEN), ("vision_end", _END_TOKEN))
    ]
    try:
        token, start, end = token_texts(directory, marks)
    except ModelError as error:
        logger.warning("requests with video are refused: %s", error)
        return None
    return _form(config, processor, sizes, marks[0], (token, start, end))


def _processor(directory: Path, images: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the config of the video processor."""
    for name, field in _FILES:
        if (path := directory / name).is_file():
            found: Any = read_json(path) if field is None else read_json(path).get(field)
            if isinstance(found, dict):
                return found
    return images


def _numbers(processor: Mapping[str, Any]) -> list[float]:
    """Return the numbers that make pixels of bytes."""
    numbers = normalization_of(processor, CLIP_MEAN, CLIP_STD)
    return [numbers.factor, *numbers.mean, *numbers.std]


def _form(
    config: Mapping[str, Any],
    processor: Mapping[str, Any],
    sizes: Mapping[str, int],
    token_id: int,
    texts: tuple[str, str, str],
) -> VideoFormat:
    token, start, end = texts
    frames, square = sizes["temporal_patch_size"], (sizes["patch_size"] * sizes["merge_size"]) ** 2
    stamped = not str(config["model_type"]).startswith(("qwen2_vl", "qwen2_5_vl"))
    least, most = _pixels(processor, square)
    capped, cap = processor.get("cap_pixels_per_frame"), processor.get("max_video_tokens")
    size: FramePixels | ClipPixels
    if stamped:
        frame = (cap or _MOST_TOKENS) * square if capped else most
        size = ClipPixels(min_pixels=least, max_pixels=most, frame_pixels=frame)
    else:
        clip = int((cap or _CONTEXT) * square * _SHARE) if capped else most * _MAX_FRAMES
        size = FramePixels(min_pixels=least, max_pixels=most, clip_pixels=clip)
    return VideoFormat(
        frames=frames,
        sampling=FrameSampling(
            per_second=float(processor.get("fps") or _PER_SECOND),
            min_frames=processor.get("min_frames") or _MIN_FRAMES,
            max_frames=processor.get("max_frames") or _MAX_FRAMES,
            to_last=stamped,
        ),
        size=size,
        patch=sizes["patch_size"] * sizes["merge_size"],
        resample=resample_of(processor, BICUBIC),
        marker=f"{start}{token}{end}" if stamped else token,
        token=token,
        token_id=token_id,
        max_tokens=_group_tokens(size, frames, square),
        stamp="<{seconds:.1f} seconds>" if stamped else "",
        prefix=start if stamped else "",
        suffix=end if stamped else "",
        positions_per_second=_positions_per_second(config),
    )


def _pixels(processor: Mapping[str, Any], square: int) -> tuple[int, int]:
    """Return the least and most pixels, under the names of a video processor or the older ones."""
    given = processor.get("size") or {}
    least = processor.get("min_pixels") or given.get("shortest_edge") or _LEAST_TOKENS * square
    most = processor.get("max_pixels") or given.get("longest_edge") or _MOST_TOKENS * square
    return least, most


def _positions_per_second(config: Mapping[str, Any]) -> float | None:
    """Return the positions of a second in Qwen2.5-VL; None in a model whose positions count groups."""
    if config["model_type"] != "qwen2_5_vl":
        return None
    return float(config["vision_config"].get("tokens_per_second") or 4)


def _group_tokens(size: FramePixels | ClipPixels, frames: int, square: int) -> int:
    """Return the maximum tokens of a group. A clip has two frames at least."""
    if isinstance(size, FramePixels):
        least, most = size.min_pixels, max(size.max_pixels, int(size.min_pixels * 1.05))
    else:
        least, most = size.min_pixels // frames, min(size.max_pixels // frames, size.frame_pixels)
        most = max(most, int(size.min_pixels * 1.05))
    return most_tokens(least / square, most / square)


def bounded_clips(model: ImageModel, context: int, *, cpu: bool) -> ImageModel:
    """Return the model with clips that are scaled down to what a context holds and an array may have.

    On a CPU, groups have at most `CPU_TOKENS`, as images.
    """
    form = model.video
    if form is None:
        return model
    square = form.patch**2
    tokens = int(context * _SHARE)
    if isinstance(form.size, FramePixels):
        clip = min(form.size.clip_pixels, tokens * square, _MOST_BYTES // (3 * form.frames))
        most = min(form.size.max_pixels, CPU_TOKENS * square if cpu else clip)
        size: FramePixels | ClipPixels = FramePixels(
            min_pixels=min(form.size.min_pixels, most), max_pixels=most, clip_pixels=clip
        )
    else:
        most = min(form.size.max_pixels, form.frames * tokens * square, _MOST_BYTES // 3)
        frame = min(form.size.frame_pixels, CPU_TOKENS * square if cpu else most)
        size = ClipPixels(min_pixels=min(form.size.min_pixels, most), max_pixels=most, frame_pixels=frame)
    max_tokens = min(form.max_tokens, _group_tokens(size, form.frames, square))
    return replace(model, video=structs.replace(form, size=size, max_tokens=max_tokens))
