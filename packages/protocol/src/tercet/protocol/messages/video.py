"""Video in requests: the form in which a model takes clips. Since 1.1.

A clip is a row of groups of frames. Each group is an `ImageInput`: it is encoded, cached and placed as an image is.
"""

from collections.abc import Sequence

import msgspec


class FrameSampling(msgspec.Struct, frozen=True, kw_only=True):
    """Rule by which frames of a file are chosen: so many per second, within bounds."""

    per_second: float
    min_frames: int
    max_frames: int
    to_last: bool
    """The last frame is among them. Otherwise they are a whole number of groups, at equal distances from the first."""


class FramePixels(msgspec.Struct, frozen=True, kw_only=True, tag="frame"):
    """Size near that of a frame, with at least `min_pixels` and at most `max_pixels`.

    The frames that groups show may have at most `clip_pixels` in all, one of each group counted.
    """

    min_pixels: int
    max_pixels: int
    clip_pixels: int


class ClipPixels(msgspec.Struct, frozen=True, kw_only=True, tag="clip"):
    """Size near that of a frame, with `min_pixels` to `max_pixels` in all frames, `frame_pixels` at most in each."""

    min_pixels: int
    max_pixels: int
    frame_pixels: int


class VideoFormat(msgspec.Struct, frozen=True, kw_only=True):
    """Form of the clips that a model takes: groups of frames, arrays uint8 [frames, height, width, 3].

    Each square of `patch` pixels of a group has one placeholder token. `resample` is the number of the filter in
    Pillow.
    """

    frames: int
    """Frames of a group."""
    sampling: FrameSampling
    size: FramePixels | ClipPixels
    patch: int
    resample: int
    marker: str
    """Text that the chat template writes for a clip."""
    token: str
    """Text of a placeholder token."""
    token_id: int
    max_tokens: int
    """Maximum tokens of a group."""
    stamp: str = ""
    """Text before a group, with `{seconds:.1f}` in the place of its time. Without one, groups follow each other, and
    their positions have the time as a part."""
    prefix: str = ""
    suffix: str = ""
    """Texts around the placeholder tokens of a group."""
    positions_per_second: float | None = None
    """Positions between groups without stamps that are a second apart; None if each group has the next position."""

    def replacement(self, height: int, width: int, seconds: Sequence[float]) -> str:
        """Return the text that takes the place of the marker before tokenization, for groups at these times."""
        group = self.prefix + self.token * self.embeddings(height, width) + self.suffix
        return "".join(self.stamp.format(seconds=each) + group for each in seconds)

    def fits(self, height: int, width: int) -> bool:
        """Return whether a group may have this size."""
        return all(side > 0 and side % self.patch == 0 for side in (height, width))

    def embeddings(self, height: int, width: int) -> int:
        """Return the number of embeddings, and so of placeholder tokens, of a group."""
        return (height // self.patch) * (width // self.patch)
