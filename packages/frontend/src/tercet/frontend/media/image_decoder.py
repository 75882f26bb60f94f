"""`ImageDecoder`: images of requests as the arrays that a model takes, made in helper processes.

No result is kept: otherwise the time of a request would show a client which images others have sent.
"""

import asyncio
import hashlib
from contextlib import AbstractAsyncContextManager
from functools import cache
from importlib.util import find_spec
from typing import Protocol

import msgspec

from tercet.frontend.errors import UnsupportedParameterError
from tercet.frontend.helper.pool import HelperPool
from tercet.frontend.helper.process import HelperDiedError, HelperProcess
from tercet.frontend.media.file_urls import file_at, refused_file
from tercet.frontend.media.image_pipe import Decode, Decoded, decode_result
from tercet.protocol.messages.media import ImageFormat

WORKER = "tercet.frontend.media.image_worker"
MAX_URL_LENGTH = 16_777_216
"""Maximum characters of a URL, which may be the image itself."""
MAX_FILE_BYTES = MAX_URL_LENGTH // 4 * 3
"""Maximum bytes of a file: those of its base64 text in the longest URL."""


class ImageSource(msgspec.Struct, frozen=True, kw_only=True):
    """Image of a request before it is decoded."""

    url: str
    param: str
    """Client's parameter name for error messages."""


class DecodedImage(msgspec.Struct, frozen=True, kw_only=True):
    """Array of an image, uint8 [height, width, 3], and the SHA-256 of its sizes, its grid and itself."""

    array: bytes
    height: int
    width: int
    grid: tuple[int, int] = (0, 0)
    """Rows and columns of tiles of an image that is cut into several."""
    original: tuple[int, ...] = ()
    """See `ImageInput.original`."""
    sha256: bytes


class Fetcher(Protocol):
    """Reader of files at http and https URLs."""

    def file(
        self, source: ImageSource, noun: str = "image", max_bytes: int = MAX_FILE_BYTES
    ) -> AbstractAsyncContextManager[bytes]:
        """Read a file, which errors call by a noun. Raises ApiError."""
        ...


class ImageDecoder:
    """Pool of up to `workers` processes, started on demand. Images beyond `max_waiting` are refused.

    An image gets `seconds` of processor time. Without a fetcher, images are read from `data:` URLs only.
    """

    def __init__(
        self, workers: int = 2, max_waiting: int = 64, seconds: float = 5.0, fetcher: Fetcher | None = None
    ) -> None:
        self._seconds = seconds
        self._fetcher = fetcher
        self._pool = HelperPool([HelperProcess(WORKER) for _ in range(workers)], max_waiting, "images")

    @property
    def pids(self) -> list[int]:
        return self._pool.pids

    async def close(self) -> None:
        await self._pool.close()

    async def decode(self, source: ImageSource, form: ImageFormat) -> DecodedImage:
        """Return an image in the form that a model takes. Raises ApiError."""
        if not _has_pillow():
            raise UnsupportedParameterError(
                "This server decodes no images: it was installed without tercet-frontend[media].", param=source.param
            )
        async with self._file(source) as file:
            order = Decode(
                base64=file if isinstance(file, str) else "",
                file=b"" if isinstance(file, str) else file,
                size=form.size,
                patch=form.patch,
                resample=form.resample,
                seconds=self._seconds,
            )
            try:
                result = decode_result(await self._pool.run(lambda helper: helper.ask(order)))
            except HelperDiedError as error:
                raise refused_file(f"it takes too {error.why} to decode", "image", source.param) from None
        if result.error:
            raise refused_file(result.error, "image", source.param)
        sha256 = await asyncio.to_thread(digest_of, result)
        return DecodedImage(
            array=result.array,
            height=result.height,
            width=result.width,
            grid=result.grid,
            original=result.original,
            sha256=sha256,
        )

    def _file(self, source: ImageSource) -> AbstractAsyncContextManager[str | bytes]:
        """Return the file at a URL, in base64 from a `data:` URL. Raises ApiError."""
        fetcher = self._fetcher
        fetch = None if fetcher is None else lambda: fetcher.file(source)
        return file_at(source.url, "image", source.param, fetch)


def digest_of(image: Decoded) -> bytes:
    """Return the hash of an image. Sizes and grid are parts, because arrays of other ones may have the same bytes."""
    sizes = (image.height, image.width, *image.grid, *image.original)
    digest = hashlib.sha256("".join(f"{size} " for size in sizes).encode())
    digest.update(image.array)
    return digest.digest()


@cache
def _has_pillow() -> bool:
    return find_spec("PIL") is not None
