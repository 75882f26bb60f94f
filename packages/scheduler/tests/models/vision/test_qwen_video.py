"""Forms of clips of Qwen2.5-VL and Qwen3-VL, from the configs of their video processors."""

import json
from pathlib import Path
from typing import Any

import pytest

from packages.scheduler.tests.models.vision.qwen_checkpoint import SQUARE, VIDEO, processor_of, write_qwen
from tercet.protocol.messages.video import ClipPixels, FramePixels, FrameSampling, VideoFormat
from tercet.scheduler.models.vision.image_model import CPU_TOKENS
from tercet.scheduler.models.vision.qwen import image_model
from tercet.scheduler.models.vision.qwen_video import bounded_clips

SMALL, LARGE = 4 * SQUARE**2, 60 * SQUARE**2


@pytest.fixture(scope="module")
def older(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_qwen(tmp_path_factory.mktemp("older"), "Qwen2_5_VL")


@pytest.fixture(scope="module")
def newer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_qwen(tmp_path_factory.mktemp("newer"), "Qwen3VL")


def form_of(source: Path, target: Path, **files: Any) -> VideoFormat | None:
    """Return the form of the clips of a model with other or changed JSON files, named without their suffix."""
    for path in source.glob("*.json"):
        (target / path.name).write_bytes(path.read_bytes())
    for name, content in files.items():
        (target / f"{name}.json").write_text(json.dumps(content))
    model = image_model(target)
    assert model is not None
    return model.video


def test_the_image_processor_s_pixels_are_the_defaults(older: Path, newer: Path, tmp_path: Path) -> None:
    form = form_of(older, tmp_path)
    assert form is not None
    assert form.sampling == FrameSampling(per_second=2.0, min_frames=4, max_frames=768, to_last=False)
    assert form.size == FramePixels(min_pixels=SMALL, max_pixels=LARGE, clip_pixels=768 * LARGE)
    assert (form.frames, form.patch, form.token_id, form.marker) == (2, SQUARE, VIDEO, "<|video_pad|>")
    assert (form.stamp, form.prefix, form.positions_per_second) == ("", "", 4.0)
    form = form_of(newer, tmp_path)
    assert form is not None
    assert form.sampling.to_last
    assert form.size == ClipPixels(min_pixels=SMALL, max_pixels=LARGE, frame_pixels=LARGE)
    assert form.marker == "<|vision_start|><|video_pad|><|vision_end|>"
    assert form.replacement(SQUARE, 2 * SQUARE, [0.25]) == (
        "<0.2 seconds><|vision_start|><|video_pad|><|video_pad|><|vision_end|>"
    )


VIDEO_PROCESSOR = {
    **processor_of(),
    "min_pixels": None,
    "max_pixels": None,
    "size": {"shortest_edge": 128, "longest_edge": 6400},
    "fps": 1,
    "min_frames": 2,
    "max_frames": 10,
    "cap_pixels_per_frame": True,
    "max_video_tokens": 50,
}


@pytest.mark.parametrize("name", ["video_preprocessor_config", "processor_config"])
def test_a_video_processor_of_its_own_counts(older: Path, newer: Path, tmp_path: Path, name: str) -> None:
    content = {"video_processor": VIDEO_PROCESSOR} if name == "processor_config" else VIDEO_PROCESSOR
    form = form_of(older, tmp_path, **{name: content})
    assert form is not None
    assert form.sampling == FrameSampling(per_second=1.0, min_frames=2, max_frames=10, to_last=False)
    assert form.size == FramePixels(min_pixels=128, max_pixels=6400, clip_pixels=45 * SQUARE**2)
    form = form_of(newer, tmp_path, **{name: content})
    assert form is not None
    assert form.size == ClipPixels(min_pixels=128, max_pixels=6400, frame_pixels=50 * SQUARE**2)


@pytest.mark.parametrize(
    ("files", "why"),
    [
        ({"video_preprocessor_config": {**VIDEO_PROCESSOR, "image_mean": [0.1, 0.2, 0.3]}}, "normalization"),
        ({"video_preprocessor_config": {**VIDEO_PROCESSOR, "patch_size": 8}}, "patches"),
    ],
)
def test_other_processors_are_not_supported(
    older: Path, tmp_path: Path, files: dict[str, Any], why: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert form_of(older, tmp_path, **files) is None
    assert "requests with video are refused" in caplog.text
    assert why in caplog.text


def test_a_tokenizer_without_the_token_leaves_images(
    older: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = json.loads((older / "config.json").read_text())
    assert form_of(older, tmp_path, config={**config, "video_token_id": 200}) is None
    assert "lacks the tokens" in caplog.text


@pytest.mark.parametrize(("context", "cpu", "tokens"), [(100, False, 90), (1 << 20, True, CPU_TOKENS)])
def test_clips_are_bounded_by_the_context_and_on_a_cpu(
    older: Path, newer: Path, context: int, cpu: bool, tokens: int
) -> None:
    for directory in (older, newer):
        model = image_model(directory)
        assert model is not None
        bounded = bounded_clips(model, context, cpu=cpu).video
        assert bounded is not None
        assert model.video is not None
        if isinstance(bounded.size, FramePixels):
            assert bounded.size.max_pixels == min(LARGE, tokens * SQUARE**2)
            assert bounded.size.clip_pixels <= int(0.9 * context) * SQUARE**2
        else:
            assert bounded.size.max_pixels == min(LARGE, 2 * int(0.9 * context) * SQUARE**2)
            assert bounded.size.frame_pixels <= tokens * SQUARE**2
        assert bounded.max_tokens <= model.video.max_tokens
