"""`VideoDecoder`: clips of requests as the groups of frames that a model takes, made in helper processes.

No result is kept: otherwise the time of a request would show a client which clips others have sent.
"""

import asyncio
import hashlib
from contextlib import AbstractAsyncContextManager
from functools import cache
from importlib.util import find_spec

import msgspec

from tercet.frontend.errors import UnsupportedParameterError
from tercet.frontend.helper.pool import HelperPool
from tercet.frontend.helper.process import HelperDiedError, HelperProcess
from tercet.frontend.media.file_urls import file_at, refused_file
from tercet.frontend.media.image_decoder import Fetcher, ImageSource
from tercet.frontend.media.video.pipe import FrameGroup, ReadGroup, ReadVideo, decode_group
from tercet.protocol.messages.video import VideoFormat

WORKER = "tercet.frontend.media.video.worker"
MAX_URL_LENGTH = 16_777_216
"""Maximum characters of a URL, which may be the clip itself: a file of 12 MiB."""
MAX_FILE_BYTES = 25_165_824
"""Maximum bytes of a file at a URL."""
MAX_ARRAY_BYTES = 268_435_456
_STILLS = "data:video/jpeg;"
"""Beginning of a URL that has frames, files of images in base64 with commas between them, as vLLM takes them."""
_PACKAGES = ("av", "PIL", "numpy")


class VideoSource(msgspec.Struct, frozen=True, kw_only=True):
    """Clip of a request before it is decoded."""

    url: str
    param: str
    """Client's parameter name for error messages."""


class DecodedGroup(msgspec.Struct, frozen=True, kw_only=True):
    """Group of frames, uint8 [frames, height, width, 3], and the SHA-256 of its size and itself."""

    array: bytes
    height: int
    width: int
    seconds: float
    time: int
    sha256: bytes


class DecodedVideo(msgspec.Struct, frozen=True):
    """Clip as groups of frames of one size."""

    groups: list[DecodedGroup]


class _VideoError(Exception):
    """Fault of a clip; the message completes "the video is refused: "."""


class VideoDecoder:
    """Pool of up to `workers` processes, started on demand. Clips beyond `max_waiting` are refused.

    A clip gets `seconds` of processor time. Without a fetcher, clips are read from `data:` URLs only.
    """

    def __init__(
        self, workers: int = 2, max_waiting: int = 16, seconds: float = 60.0, fetcher: Fetcher | None = None
    ) -> None:
        self._seconds = seconds
        self._fetcher = fetcher
        self._pool = HelperPool([HelperProcess(WORKER) for _ in range(workers)], max_waiting, "videos")

    @property
    def pids(self) -> list[int]:
        return self._pool.pids

    async def close(self) -> None:
        await self._pool.close()

    async def decode(self, source: VideoSource, form: VideoFormat) -> DecodedVideo:
        """Return a clip in the form that a model takes. Raises ApiError."""
        if not _has_packages():
            raise UnsupportedParameterError(
                "This server decodes no video: it was installed without tercet-frontend[video].", param=source.param
            )
        async with self._file(source) as file:
            order = ReadVideo(
                base64=file if isinstance(file, str) else "",
                file=b"" if isinstance(file, str) else file,
                stills=source.url.startswith(_STILLS),
                form=form,
                seconds=self._seconds,
            )
            try:
                groups = await self._pool.run(lambda helper: _groups(helper, order))
            except HelperDiedError as error:
                raise refused_file(f"it takes too {error.why} to decode", "video", source.param) from None
            except _VideoError as error:
                raise refused_file(str(error), "video", source.param) from None
        return DecodedVideo([await _with_digest(group) for group in groups])

    def _file(self, source: VideoSource) -> AbstractAsyncContextManager[str | bytes]:
        """Return the file at a URL, in base64 from a `data:` URL. Raises ApiError."""
        fetcher = self._fetcher
        asked = ImageSource(url=source.url, param=source.param)
        fetch = None if fetcher is None else lambda: fetcher.file(asked, noun="video", max_bytes=MAX_FILE_BYTES)
        return file_at(source.url, "video", source.param, fetch)


async def _groups(helper: HelperProcess, order: ReadVideo) -> list[FrameGroup]:
    """Return the groups of a clip, one answer each, so that no copy of them all holds up the event loop."""
    groups: list[FrameGroup] = []
    held = tokens = 0
    group = await _ask(helper, order)
    while group.array:
        if group.time > tokens:
            raise _VideoError("it is too long for the size of its frames")
        groups.append(group)
        held += len(group.array)
        tokens += order.form.embeddings(group.height, group.width)
        if held > MAX_ARRAY_BYTES:
            raise _VideoError(f"its frames take more than {MAX_ARRAY_BYTES} bytes as the model's arrays")
        group = await _ask(helper, ReadGroup())
    return groups


async def _ask(helper: HelperProcess, order: ReadVideo | ReadGroup) -> FrameGroup:
    group = decode_group(await helper.ask(order))
    if group.error:
        raise _VideoError(group.error)
    return group


async def _with_digest(group: FrameGroup) -> DecodedGroup:
    return DecodedGroup(
        array=group.array,
        height=group.height,
        width=group.width,
        seconds=group.seconds,
        time=group.time,
        sha256=await asyncio.to_thread(group_digest, group),
    )


def group_digest(group: FrameGroup) -> bytes:
    """Return the hash of a group, which no image has: its size and its number of bytes are parts."""
    digest = hashlib.sha256(f"frames {len(group.array)} {group.height} {group.width} ".encode())
    digest.update(group.array)
    return digest.digest()


@cache
def _has_packages() -> bool:
    return all(find_spec(name) is not None for name in _PACKAGES)
