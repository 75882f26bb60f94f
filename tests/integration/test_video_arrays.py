"""Frames of clips, their number, size and pixels equal those of transformers' video processors."""

from functools import partial
from io import BytesIO
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

pytest.importorskip("av")

import av
from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor
from transformers.video_utils import VideoMetadata

from packages.frontend.tests.media.video.video_files import video
from packages.frontend.tests.media.video.video_forms import JOINED, STAMPED
from tercet.frontend.media.image_sizes import AspectRatioError
from tercet.frontend.media.video.pipe import ReadVideo
from tercet.frontend.media.video.sampling import frame_indices, frame_size, group_times
from tercet.frontend.media.video.worker import clip_groups
from tercet.protocol.messages.video import ClipPixels, FramePixels, FrameSampling, VideoFormat
from tests.integration.video_processors import QWEN2, QWEN3, Frames, resized, sampled, sized

FORMS = {QWEN2: JOINED, QWEN3: STAMPED}
frames_of_files = st.integers(2, 5000)
rates = st.sampled_from([1, 5, 12.5, 23.976, 24, 25, 29.97, 30, 50, 59.94, 60]) | st.floats(0.5, 120)
sides = st.integers(1, 2500)


def with_sampling(form: VideoFormat, least: int, most: int) -> VideoFormat:
    to_last = form.sampling.to_last
    rule = FrameSampling(per_second=2.0, min_frames=least, max_frames=most, to_last=to_last)
    return structs.replace(form, sampling=rule)


@given(frames_of_files, rates, st.sampled_from([(4, 768), (4, 16), (6, 33)]))
def test_frames_of_qwen3_equal_those_of_transformers(frames: int, rate: float, bounds: tuple[int, int]) -> None:
    expected = sampled(QWEN3, frames, rate, min_frames=bounds[0], max_frames=bounds[1])
    assert frame_indices(frames, rate, with_sampling(STAMPED, *bounds)) == expected


@given(frames_of_files, rates, st.sampled_from([(4, 768), (4, 16), (6, 32)]))
def test_frames_of_qwen2_equal_those_of_transformers(frames: int, rate: float, bounds: tuple[int, int]) -> None:
    found = frame_indices(frames, rate, with_sampling(JOINED, *bounds))
    expected = sampled(QWEN2, frames, rate, min_frames=bounds[0], max_frames=bounds[1])
    assert found == expected[: len(found)]
    assert len(expected) - len(found) <= 1, "rounding of torch.arange may add a frame"


@given(sides, sides, st.integers(2, 800), st.integers(1, 200), st.integers(200, 30_000))
def test_sizes_of_qwen3_equal_those_of_transformers(
    height: int, width: int, frames: int, least: int, most: int
) -> None:
    size = ClipPixels(min_pixels=least * 1024, max_pixels=most * 1024, frame_pixels=most * 1024)
    form = structs.replace(STAMPED, patch=32, size=size)
    check_size(form, sized_by(QWEN3, height, width, frames, least * 1024, most * 1024, 32), height, width, frames)


@given(sides, sides, st.integers(2, 800), st.integers(1, 200), st.integers(200, 30_000), st.integers(200, 99_999))
def test_sizes_of_qwen2_equal_those_of_transformers(
    height: int, width: int, frames: int, least: int, most: int, clip: int
) -> None:
    size = FramePixels(min_pixels=least * 784, max_pixels=most * 784, clip_pixels=clip * 784)
    form = structs.replace(JOINED, patch=28, size=size)
    share = clip * 784 * 2 // frames  # as with cap_pixels_per_frame
    capped = most * 784 if share >= most * 784 else max(share, int(least * 784 * 1.05))
    check_size(form, sized_by(QWEN2, height, width, frames, least * 784, capped, 28), height, width, frames)


def sized_by(module: Any, height: int, width: int, frames: int, *more: int) -> tuple[int, int] | None:
    """Return the size of transformers; None if it is refused."""
    try:
        return sized(module, height, width, frames, *more)
    except ValueError:
        return None


def check_size(form: VideoFormat, expected: tuple[int, int] | None, height: int, width: int, frames: int) -> None:
    if expected is None:
        with pytest.raises(AspectRatioError):
            frame_size(height, width, frames, form)
        return
    assert frame_size(height, width, frames, form) == expected
    assert form.fits(*expected)


def test_times_are_rounded_as_by_torch() -> None:
    form = structs.replace(JOINED, positions_per_second=2.0)
    assert group_times(4, 1.0, form) == [0, 2, 4, 6]
    assert group_times(4, 0.99999999999, form) == [0, 2, 4, 6], "float32"
    assert group_times(4, 0.7, form) == [0, 1, 2, 4]
    assert group_times(4, 0.7, structs.replace(form, positions_per_second=None)) == [0, 1, 2, 3]


@pytest.mark.parametrize("module", FORMS, ids=["Qwen2", "Qwen3"])
@pytest.mark.parametrize("size", [(96, 64), (61, 47), (200, 40)])
def test_arrays_equal_those_of_transformers(module: Any, size: tuple[int, int]) -> None:
    form = FORMS[module]
    file = video(45, rate=15, size=(size[0] // 2 * 2, size[1] // 2 * 2))
    groups = list(clip_groups(ReadVideo(file=file, form=form, seconds=5)))
    with av.open(BytesIO(file), "r") as container:
        every = [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]
    chosen = sampled(module, 45, 15)
    expected = expected_arrays(module, form, np.stack([every[index] for index in chosen]))
    found = [np.frombuffer(each.array, np.uint8).reshape(2, each.height, each.width, 3) for each in groups]
    assert np.concatenate(found).shape == expected.shape
    difference = np.abs(np.concatenate(found).astype(int) - expected)
    assert difference.max() <= 1, "torchvision rounds the weights of its filter in another way than Pillow"


def expected_arrays(module: Any, form: VideoFormat, frames: Frames) -> Frames:
    """Return frames resized as by a processor."""
    bounds = form.size.min_pixels, form.size.max_pixels
    return resized(frames, sized(module, frames.shape[1], frames.shape[2], len(frames), *bounds, form.patch))


def test_texts_equal_those_of_transformers() -> None:
    groups = list(clip_groups(ReadVideo(file=video(45, rate=15), form=STAMPED, seconds=5)))
    own: Any = SimpleNamespace(
        video_processor=SimpleNamespace(merge_size=2, temporal_patch_size=2),
        video_token=STAMPED.token,
        vision_start_token=STAMPED.prefix,
        vision_end_token=STAMPED.suffix,
        _calculate_timestamps=partial(Qwen3VLProcessor._calculate_timestamps, None),
    )
    metadata = VideoMetadata(total_num_frames=45, fps=15, frames_indices=sampled(QWEN3, 45, 15))
    grid = torch.tensor([[len(groups), groups[0].height // 8, groups[0].width // 8]])
    expected = Qwen3VLProcessor.replace_video_token(own, {"video_grid_thw": grid, "video_metadata": [metadata]}, 0)
    text = STAMPED.replacement(groups[0].height, groups[0].width, [each.seconds for each in groups])
    assert text == expected
