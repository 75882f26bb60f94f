"""`PictureDecoder`: pictures of requests as the arrays that a model takes, made in helper processes.

No result is kept: otherwise the time of a request would show a client which pictures others have sent.
"""

import asyncio
import hashlib
from importlib.util import find_spec

import msgspec

from tercet.frontend.errors import BadRequestError, UnsupportedParameterError
from tercet.frontend.helper.pool import HelperPool
from tercet.frontend.helper.process import HelperDiedError, HelperProcess
from tercet.frontend.media.pipe import Decode, decode_result
from tercet.protocol.messages.media import PictureFormat

WORKER = "tercet.frontend.media.worker"


class PictureSource(msgspec.Struct, frozen=True, kw_only=True):
    """Picture of a request before it is decoded."""

    url: str
    param: str
    """Client's parameter name for error messages."""


class Picture(msgspec.Struct, frozen=True):
    """Array of a picture, and its SHA-256."""

    array: bytes
    sha256: bytes


class PictureDecoder:
    """Pool of up to `workers` processes, started on demand. Pictures beyond `max_waiting` are refused.

    A picture gets `seconds` of processor time.
    """

    def __init__(self, workers: int = 2, max_waiting: int = 64, seconds: float = 5.0) -> None:
        self._seconds = seconds
        self._pool = HelperPool([HelperProcess(WORKER) for _ in range(workers)], max_waiting, "pictures")

    @property
    def pids(self) -> list[int]:
        return self._pool.pids

    async def close(self) -> None:
        await self._pool.close()

    async def decode(self, source: PictureSource, form: PictureFormat) -> Picture:
        """Return a picture in the form that a model takes. Raises ApiError."""
        if find_spec("PIL") is None:
            raise UnsupportedParameterError(
                "This server decodes no pictures: it was installed without tercet-frontend[media].", param=source.param
            )
        order = Decode(
            base64=_base64(source), height=form.height, width=form.width, resample=form.resample, seconds=self._seconds
        )
        try:
            result = decode_result(await self._pool.run(lambda helper: helper.ask(order)))
        except HelperDiedError as error:
            raise _refused(f"it takes too {error.why} to decode", source) from None
        if result.error:
            raise _refused(result.error, source)
        digest = await asyncio.to_thread(hashlib.sha256, result.array)
        return Picture(result.array, digest.digest())


def _base64(source: PictureSource) -> str:
    """Return the base64 text of a `data:` URL. Raises BadRequestError for any other URL."""
    head, comma, data = source.url.partition(",")
    if not head.startswith("data:"):
        raise BadRequestError(
            "Pictures are read from 'data:' URLs only: send the picture itself, in base64.",
            param=source.param,
            code="invalid_image_url",
        )
    if not comma or not head.endswith(";base64"):
        raise _refused("its 'data:' URL has no ';base64,' before the data", source)
    return data


def _refused(why: str, source: PictureSource) -> BadRequestError:
    return BadRequestError(f"The picture is refused: {why}.", param=source.param, code="invalid_image")
