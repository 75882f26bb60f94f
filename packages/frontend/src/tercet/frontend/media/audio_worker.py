"""`python -m tercet.frontend.media.audio_worker`: a killable process that decodes clients' audio with libsndfile.

Errors complete "the audio is refused: ". The process ends when its input ends.
"""

import binascii
import os
import sys
import time
from collections.abc import Iterator
from io import BytesIO

import numpy as np
import soundfile
import soxr

from tercet.frontend.helper.limits import detach, limit_memory, processor_time
from tercet.frontend.helper.pipe import encode_frame, read_frame
from tercet.frontend.media.audio_pipe import AudioWindow, ReadAudio, decode_order

MAX_SECONDS = 7200
"""Maximum length of an audio clip: 25 MB are less than that in most formats, and silence is days."""
MAX_CHANNELS = 8
RATES = range(1000, 384_001)
MEMORY = 256 * 1024 * 1024
"""Bytes of address space beyond those the process has: ten times those of the largest file."""
_STARTS = (b"RIFF", b"RF64", b"fLaC", b"OggS")
_MP3_SYNC = 0xFFE0
"""Eleven bits that begin each frame of MP3."""
_BLOCK = 16_384
"""Frames that are decoded at once."""
_QUIET_SECONDS = 2
"""Seconds at the end of a window in which the quietest moment is its end, so that few words are cut."""
_MOMENTS = 10
"""Moments per second."""
_FULL_SCALE = 32_768
_ID3_HEADER = 10
Samples = np.ndarray[tuple[int], np.dtype[np.int16]]


class _RefusedError(Exception):
    """Audio that is not decoded; the message is for the client."""


def main() -> None:
    """Process orders until the input ends."""
    detach()
    _silence_libraries()
    limit_memory(MEMORY)
    source, target = sys.stdin.buffer, sys.stdout.buffer
    windows: Iterator[Samples] = iter(())
    left = 0.0
    while (data := read_frame(source)) is not None:
        if isinstance(order := decode_order(data), ReadAudio):
            windows, left = audio_windows(order), order.seconds
        began = time.process_time()
        with processor_time(left):
            result = _next(windows)
        left = max(0.001, left - (time.process_time() - began))  # 0 would be no limit
        target.write(encode_frame(result))
        target.flush()


def _silence_libraries() -> None:
    """Leave standard error to Python: libsndfile's decoders print warnings about damaged files there."""
    sys.stderr = os.fdopen(os.dup(2), "w")
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 2)
    os.close(null)


def _next(windows: Iterator[Samples]) -> AudioWindow:
    try:
        window = next(windows, None)
        return AudioWindow(samples=b"" if window is None else window.tobytes())
    except _RefusedError as error:
        return AudioWindow(error=str(error))
    except MemoryError:
        return AudioWindow(error="it takes too much memory to decode")
    except Exception as error:  # soundfile raises several types for damaged files
        return AudioWindow(error=f"it is damaged ({type(error).__name__})")


def audio_windows(order: ReadAudio) -> Iterator[Samples]:
    """Yield the windows of a file, all channels mixed, at the order's rate. Raises _RefusedError.

    A rest after the last whole window that is shorter than a moment is left out, unless the windows are `exact`.
    """
    least = 1
    rest = np.zeros(0, np.int16)
    with _open(order.file or _file(order.base64)) as file:
        for part in _resampled(file, order.rate):
            rest = np.concatenate([rest, part])
            while len(rest) > order.window:
                end = order.window if order.exact else _quiet_end(rest[: order.window], order.rate)
                yield rest[:end]
                rest, least = rest[end:], least if order.exact else order.rate // _MOMENTS
    if len(rest) >= least:
        yield rest
    elif least == 1:
        raise _RefusedError("it has no samples")


def _file(text: str) -> bytes:
    try:
        return binascii.a2b_base64(text, strict_mode=True)
    except ValueError:
        raise _RefusedError("it is no base64") from None


def _open(file: bytes) -> soundfile.SoundFile:
    """Read the header of a file, and refuse too long an audio clip before it is decoded."""
    file = file[_tag_bytes(file) :]
    if not file.startswith(_STARTS) and int.from_bytes(file[:2], "big") & _MP3_SYNC != _MP3_SYNC:
        raise _RefusedError("it is none of WAV, FLAC, OGG, MP3")
    audio = soundfile.SoundFile(BytesIO(file))
    if audio.channels > MAX_CHANNELS:
        raise _RefusedError(f"it has {audio.channels} channels, and at most {MAX_CHANNELS} are mixed")
    if audio.samplerate not in RATES:
        raise _RefusedError(f"it has {audio.samplerate} samples a second, not {RATES.start} to {RATES.stop - 1}")
    if (seconds := audio.frames / audio.samplerate) > MAX_SECONDS:
        raise _RefusedError(f"it has {seconds:.0f} s, and at most {MAX_SECONDS} are read")
    return audio


def _tag_bytes(file: bytes) -> int:
    """Return the length of an ID3v2 tag before the audio, which has seven bits of it in each of four bytes."""
    if not file.startswith(b"ID3") or len(file) < _ID3_HEADER:
        return 0
    length = 0
    for byte in file[6:_ID3_HEADER]:
        length = length << 7 | byte & 0x7F
    return _ID3_HEADER + length


def _resampled(file: soundfile.SoundFile, rate: int) -> Iterator[Samples]:
    """Yield the samples of a file at a rate, at most as many as its header claims."""
    stream = soxr.ResampleStream(file.samplerate, rate, 1, dtype="float32")
    while len(block := file.read(_BLOCK, dtype="float32", always_2d=True)):
        if not np.isfinite(block).all():
            raise _RefusedError("it has samples that are no numbers")
        mixed = block.clip(-1, 1).mean(axis=1, dtype=np.float32)
        yield _integers(mixed if file.samplerate == rate else stream.resample_chunk(mixed))
    if file.samplerate != rate:
        yield _integers(stream.resample_chunk(np.zeros(0, np.float32), last=True))


def _integers(samples: np.ndarray[tuple[int], np.dtype[np.float32]]) -> Samples:
    return (samples * _FULL_SCALE).round().clip(-_FULL_SCALE, _FULL_SCALE - 1).astype(np.int16)


def _quiet_end(window: Samples, rate: int) -> int:
    """Return the middle of the quietest moment near the end of a window."""
    moment = rate // _MOMENTS
    last = window[-_QUIET_SECONDS * rate :]
    last = last[len(last) % moment :].reshape(-1, moment).astype(np.float32)
    quietest = int(np.square(last).sum(axis=1).argmin())
    return len(window) - (len(last) - quietest) * moment + moment // 2


if __name__ == "__main__":
    main()
