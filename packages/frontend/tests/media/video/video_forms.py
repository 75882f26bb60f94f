"""Forms of clips, with smaller numbers than those of published models."""

from tercet.protocol.messages.video import ClipPixels, FramePixels, FrameSampling, VideoFormat

STAMPED = VideoFormat(
    frames=2,
    sampling=FrameSampling(per_second=2.0, min_frames=4, max_frames=24, to_last=True),
    size=ClipPixels(min_pixels=4096, max_pixels=24 * 96 * 64, frame_pixels=24 * 96 * 64),
    patch=16,
    resample=3,
    marker="<start><video><end>",
    token="<video>",
    token_id=9,
    max_tokens=128,
    stamp="<{seconds:.1f} seconds>",
    prefix="<start>",
    suffix="<end>",
)
"""Form of Qwen3-VL's clips, with smaller numbers."""
JOINED = VideoFormat(
    frames=2,
    sampling=FrameSampling(per_second=2.0, min_frames=4, max_frames=24, to_last=False),
    size=FramePixels(min_pixels=784, max_pixels=96 * 64, clip_pixels=1 << 24),
    patch=16,
    resample=3,
    marker="<video>",
    token="<video>",
    token_id=9,
    max_tokens=128,
    positions_per_second=2.0,
)
"""Form of Qwen2.5-VL's clips, with smaller numbers."""
