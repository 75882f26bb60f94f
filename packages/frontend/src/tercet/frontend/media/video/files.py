"""Frames of video files, decoded with PyAV (FFmpeg), and of files of images, decoded with Pillow.

FFmpeg opens files and URLs that playlists name, and has hundreds of demuxers and decoders. So a file's first bytes say
which of three demuxers reads it, lists of decoders and of protocols forbid all others, and FFmpeg gets bytes, no path.
"""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from fractions import Fraction
from io import BytesIO
from typing import NoReturn, Protocol

import av
from av.container import InputContainer
from av.stream import Disposition
from av.video.stream import VideoStream
from PIL import Image, ImageOps

from tercet.frontend.media.image_worker import RefusedError, open_image, rgb_of

MAX_SECONDS = 7200
MAX_FRAMES = 100_000
"""Maximum frames of a file. Those between chosen ones are decoded only if these depend on them."""
MAX_PIXELS = 16_777_216
"""Maximum pixels of a frame."""
MAX_STILLS = 768
"""Maximum images of a list."""
_DEMUXERS = {b"ftyp": "mov", b"\x1a\x45\xdf\xa3": "matroska", b"RIFF": "avi"}
"""Demuxers by the bytes at the beginning of a file; those of MP4 and MOV follow a length."""
_DECODERS = ("h264", "hevc", "vp8", "vp9", "libdav1d", "av1", "mpeg4", "mjpeg")
_OPTIONS = {
    "format_whitelist": "mov,matroska,avi",
    "codec_whitelist": ",".join(_DECODERS),
    "protocol_whitelist": "none",
    "enable_drefs": "0",
}
_SHOWN = 100
"""Characters of a name in an error."""
_STILL_SECONDS = 0.1
"""Time of a frame of an animated image that has none, as browsers have it."""


class Clip(Protocol):
    """Frames of a clip."""

    @property
    def frames(self) -> int:
        """Return their number."""
        ...

    @property
    def per_second(self) -> float: ...

    def images(self, indices: Sequence[int]) -> Iterator[Image.Image]:
        """Yield the frames of these numbers, which ascend, in RGB and upright. Raises RefusedError."""
        ...


def open_clip(file: bytes) -> Clip:
    """Read a file's headers and the places of its frames. Raises RefusedError, and errors of PyAV and Pillow."""
    start = file[4:8] if file[4:8] in _DEMUXERS else file[:4]
    if start == b"GIF8" or file[8:12] == b"WEBP":
        return Animation(file)
    if start not in _DEMUXERS or (start == b"RIFF" and file[8:12] != b"AVI "):
        raise RefusedError("it is none of MP4, MOV, WebM, MKV, AVI, GIF, WEBP")
    options = dict(_OPTIONS)
    if start != b"ftyp":
        del options["enable_drefs"]
    container = av.open(
        BytesIO(file), "r", format=_DEMUXERS[start], options=options, metadata_errors="ignore", io_open=_open_nothing
    )
    return VideoFile(container)


def _open_nothing(url: str, _flags: int, _options: object) -> NoReturn:
    """Refuse a file or URL that a file names."""
    raise RefusedError(f"it names another file, {url[:_SHOWN]!r}")


class VideoFile:
    """Clip in a file's first stream of video. The packets of all of its frames are held, no other frame is."""

    def __init__(self, container: InputContainer) -> None:
        streams = [each for each in container.streams.video if not each.disposition & Disposition.attached_pic]
        if not streams:
            raise RefusedError("it has no video")
        stream = streams[0]
        self._codec = stream.codec_context
        if self._codec.name not in _DECODERS:
            raise RefusedError(f"its codec {self._codec.name} is none of {', '.join(_DECODERS)}")
        _check_pixels(self._codec.width, self._codec.height)
        self._codec.thread_count = 1
        self._packets: list[av.Packet[VideoStream]] = []
        for packet in container.demux(stream):
            if packet.size:
                self._packets.append(packet)
            if len(self._packets) > MAX_FRAMES:
                raise RefusedError(f"it has more than {MAX_FRAMES} frames")
        if not self._packets:
            raise RefusedError("it has no frames")
        self.per_second = _rate(stream.average_rate or stream.guessed_rate)
        if (seconds := len(self._packets) / self.per_second) > MAX_SECONDS:
            raise RefusedError(f"it has {seconds:.0f} s, and at most {MAX_SECONDS} are read")
        times = [packet.pts for packet in self._packets if packet.pts is not None]
        self._times = sorted(times) if len({*times}) == len(self._packets) else None
        """Times of all frames in the order in which they are shown; None if the file does not say them."""

    @property
    def frames(self) -> int:
        return len(self._packets)

    def images(self, indices: Sequence[int]) -> Iterator[Image.Image]:
        """See `Clip`. Frames that a damaged file lacks at its end are like the last one."""
        times = self._times
        for frame in self._in_order(indices) if times is None else self._by_time([times[each] for each in indices]):
            _check_pixels(frame.width, frame.height)
            image = Image.fromarray(frame.to_ndarray(format="rgb24"))
            yield image.rotate(frame.rotation, expand=True) if frame.rotation % 360 else image

    def _by_time(self, times: Sequence[int]) -> Iterator[av.VideoFrame]:
        """Yield the frames of these times. Packets before the last key frame that precedes one are passed over."""
        keys = sorted((packet.pts or 0, place) for place, packet in enumerate(self._packets) if packet.is_keyframe)
        place, frame = 0, None
        decoded = self._decoded(place)
        for time in times:
            key = bisect_right(keys, (time, len(self._packets))) - 1
            if key >= 0 and keys[key][1] > place and (frame is None or _shown_at(frame) < keys[key][0]):
                place = keys[key][1]
                self._codec.flush_buffers()
                decoded = self._decoded(place)
                frame = None
            while frame is None or _shown_at(frame) < time:
                found = next(decoded, None)
                if found is None:
                    break
                place, frame = found
            if frame is None:
                raise RefusedError("it is damaged")
            yield frame

    def _in_order(self, indices: Sequence[int]) -> Iterator[av.VideoFrame]:
        """Yield the frames of these numbers, after decoding all before them."""
        decoded, number, frame = self._decoded(0), -1, None
        for index in indices:
            while number < index and (found := next(decoded, None)) is not None:
                _, frame = found
                number += 1
            if frame is None:
                raise RefusedError("it is damaged")
            yield frame

    def _decoded(self, place: int) -> Iterator[tuple[int, av.VideoFrame]]:
        """Yield the frames from a packet on, each with the number of the packet that was decoded last."""
        for number in range(place, len(self._packets)):
            for frame in self._codec.decode(self._packets[number]):
                yield number, frame
        for frame in self._codec.decode(None):
            yield len(self._packets), frame


class Animation:
    """Clip in an animated GIF or WebP."""

    def __init__(self, file: bytes) -> None:
        self._image = open_image(file)
        self.frames = getattr(self._image, "n_frames", 1)
        if self.frames > MAX_FRAMES:
            raise RefusedError(f"it has more than {MAX_FRAMES} frames")
        _check_pixels(self._image.width, self._image.height)
        self._image.load()  # some files say it beside a frame
        seconds = float(self._image.info.get("duration") or 0) / 1000
        self.per_second = 1 / (seconds or _STILL_SECONDS)

    def images(self, indices: Sequence[int]) -> Iterator[Image.Image]:
        """See `Clip`."""
        for index in indices:
            self._image.seek(index)
            yield rgb_of(self._image.copy())


class Stills:
    """Clip in files of images, as many per second as a model takes."""

    def __init__(self, files: Sequence[bytes], per_second: float) -> None:
        if len(files) > MAX_STILLS:
            raise RefusedError(f"it has {len(files)} frames, and at most {MAX_STILLS} are read")
        self._files = files
        self.per_second = per_second

    @property
    def frames(self) -> int:
        return len(self._files)

    def images(self, indices: Sequence[int]) -> Iterator[Image.Image]:
        """See `Clip`. All frames have the size of the first one."""
        size = None
        for index in indices:
            opened = open_image(self._files[index])
            _check_pixels(opened.width, opened.height)
            image = rgb_of(ImageOps.exif_transpose(opened))
            size = size or image.size
            if image.size != size:
                raise RefusedError("its frames have several sizes")
            yield image


def _check_pixels(width: int, height: int) -> None:
    if width * height > MAX_PIXELS:
        raise RefusedError(f"its frames have {width * height} pixels, and at most {MAX_PIXELS} are decoded")


def _rate(rate: Fraction | None) -> float:
    if rate is None or rate <= 0:
        raise RefusedError("it does not say how many frames a second it has")
    return float(rate)


def _shown_at(frame: av.VideoFrame) -> int:
    """Return the time of a frame. One without a time is before all others."""
    return -(1 << 62) if frame.pts is None else frame.pts
