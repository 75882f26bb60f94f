"""`AudioDecoder`: files of audio as windows of samples, decoded in helper processes.

No result is kept: otherwise the time of a request would show a client which audio others have sent.
"""

import asyncio
import hashlib
from functools import cache
from importlib.util import find_spec

import msgspec

from tercet.frontend.errors import BadRequestError, UnsupportedParameterError
from tercet.frontend.helper.pool import HelperPool
from tercet.frontend.helper.process import HelperDiedError, HelperProcess
from tercet.frontend.media.audio_pipe import AudioWindow, ReadAudio, ReadWindow, decode_window
from tercet.protocol.messages.audio import AudioInput, Transcript

WORKER = "tercet.frontend.media.audio_worker"
_PACKAGES = ("soundfile", "soxr")
_SAMPLE_BYTES = 2
_PART_SECONDS = 30
"""Seconds of a sound in an answer of a helper."""


class DecodedAudio(msgspec.Struct, frozen=True):
    """Window of an audio clip: int16 samples of one channel, their SHA-256, and the kind of output that is wanted."""

    samples: bytes
    sha256: bytes
    transcript: Transcript = Transcript.TEXT

    @property
    def input(self) -> AudioInput:
        """Return the part of a message beside the samples."""
        return AudioInput(sha256=self.sha256, transcript=self.transcript)


class _AudioError(Exception):
    """Fault of a file; the message completes "the audio is refused: "."""


class AudioDecoder:
    """Pool of up to `workers` processes, started on demand. Files beyond `max_waiting` are refused.

    A file gets `seconds` of processor time.
    """

    def __init__(self, workers: int = 2, max_waiting: int = 32, seconds: float = 60.0) -> None:
        self._seconds = seconds
        self._pool = HelperPool([HelperProcess(WORKER) for _ in range(workers)], max_waiting, "audio clips")

    @property
    def pids(self) -> list[int]:
        return self._pool.pids

    async def close(self) -> None:
        await self._pool.close()

    async def decode(self, file: bytes, rate: int, window: int, param: str) -> list[DecodedAudio]:
        """Return an audio clip in windows of at most `window` samples at `rate` per second. Raises ApiError."""
        order = ReadAudio(file=file, rate=rate, window=window, seconds=self._seconds)
        return [DecodedAudio(each, await asyncio.to_thread(sha256_of, each)) for each in await self._read(order, param)]

    async def decode_sound(self, base64: str, rate: int, most: int, param: str) -> bytes:
        """Return the samples of an audio clip, which is refused if it has more than `most`. Raises ApiError."""
        window = min(most, _PART_SECONDS * rate)
        order = ReadAudio(base64=base64, rate=rate, window=window, exact=True, seconds=self._seconds)
        return b"".join(await self._read(order, param, most))

    async def _read(self, order: ReadAudio, param: str, most: int | None = None) -> list[bytes]:
        """Return the windows of a file. A file of more than `most` samples is refused."""
        if not _has_packages():
            raise UnsupportedParameterError(
                "This server decodes no audio: it was installed without tercet-frontend[media].", param=param
            )
        try:
            return await self._pool.run(lambda helper: _windows(helper, order, most))
        except HelperDiedError as error:
            raise refused_audio(f"it takes too {error.why} to decode", param) from None
        except _AudioError as error:
            raise refused_audio(str(error), param) from None


async def _windows(helper: HelperProcess, order: ReadAudio, most: int | None) -> list[bytes]:
    """Return the windows of a file, one answer each, so that no copy of them all holds up the event loop."""
    windows: list[bytes] = []
    held = 0
    window = await _ask(helper, order)
    while window.samples:
        held += len(window.samples) // _SAMPLE_BYTES
        if most is not None and held > most:
            raise _AudioError(f"the model hears at most {most / order.rate:g} s")
        windows.append(window.samples)
        window = await _ask(helper, ReadWindow())
    return windows


async def _ask(helper: HelperProcess, order: ReadAudio | ReadWindow) -> AudioWindow:
    window = decode_window(await helper.ask(order))
    if window.error:
        raise _AudioError(window.error)
    return window


def sha256_of(samples: bytes) -> bytes:
    return hashlib.sha256(samples).digest()


@cache
def _has_packages() -> bool:
    return all(find_spec(name) is not None for name in _PACKAGES)


def refused_audio(why: str, param: str) -> BadRequestError:
    return BadRequestError(f"The audio is refused: {why}.", param=param, code="invalid_audio")
