"""Frames that are chosen of a clip, their times, and the size of their arrays, as Qwen's video processors have them."""

import math
from collections.abc import Sequence

import numpy as np

from tercet.frontend.media.image_sizes import Size, array_size, check_ratio
from tercet.protocol.messages.media import PixelRange
from tercet.protocol.messages.video import ClipPixels, FramePixels, VideoFormat

_FLOOR = 1.05
"""Least pixels of a frame that is scaled down for the sake of a long clip, in those of the shortest one."""


def frame_indices(frames: int, per_second: float, form: VideoFormat) -> list[int]:
    """Return the numbers of the frames to show, of a file with so many frames."""
    rule = form.sampling
    wanted = frames / per_second * rule.per_second
    if rule.to_last:
        count = min(max(int(wanted), rule.min_frames), rule.max_frames, frames)
        return [int(index) for index in np.linspace(0, frames - 1, count).round()]
    most = min(rule.max_frames, frames) // form.frames * form.frames
    count = int(min(max(wanted, rule.min_frames), most)) // form.frames * form.frames
    if not count:
        return [0]
    places = (np.arange(count) * (frames / count)).astype(np.float32)
    return [int(index) for index in places]


def groups_of(indices: Sequence[int], form: VideoFormat) -> list[list[int]]:
    """Return the numbers of the frames of each group. The last frame fills the last group."""
    padded = [*indices, *[indices[-1]] * (-len(indices) % form.frames)]
    return [padded[first : first + form.frames] for first in range(0, len(padded), form.frames)]


def group_times(groups: int, seconds: float, form: VideoFormat) -> list[int]:
    """Return the position of each group relative to the first, for groups so many seconds apart."""
    step = 1.0 if form.positions_per_second is None else form.positions_per_second * seconds
    return [int(time) for time in np.arange(groups, dtype=np.float32) * np.float32(step)]


def frame_size(height: int, width: int, frames: int, form: VideoFormat) -> Size:
    """Return the height and width of the array of each of so many frames. Raises AspectRatioError."""
    frames = max(frames, form.frames)
    match form.size:
        case FramePixels() as size:
            share = size.clip_pixels * form.frames // frames
            most = size.max_pixels if share >= size.max_pixels else max(share, int(size.min_pixels * _FLOOR))
            return array_size(height, width, PixelRange(min_pixels=size.min_pixels, max_pixels=most), form.patch)
        case ClipPixels() as size:
            most = size.max_pixels
            if size.frame_pixels < size.max_pixels:
                most = frames * max(min(size.frame_pixels, most // frames), int(size.min_pixels * _FLOOR))
            return _clip_size(height, width, frames, size.min_pixels, most, form)


def _clip_size(height: int, width: int, frames: int, least: int, most: int, form: VideoFormat) -> Size:
    """Return the nearest size with a number of pixels of all frames in a range, by Qwen3-VL's `smart_resize`."""
    patch = form.patch
    if height < patch or width < patch:
        scale = max(patch / height, patch / width)
        height, width = int(height * scale), int(width * scale)
    check_ratio(height, width)
    rounded = round(height / patch) * patch, round(width / patch) * patch
    pixels = round(frames / form.frames) * form.frames * math.prod(rounded)
    if pixels > most:
        scale = math.sqrt(frames * height * width / most)
        return (
            max(patch, math.floor(height / scale / patch) * patch),
            max(patch, math.floor(width / scale / patch) * patch),
        )
    if pixels < least:
        scale = math.sqrt(least / (frames * height * width))
        return math.ceil(height * scale / patch) * patch, math.ceil(width * scale / patch) * patch
    return rounded
