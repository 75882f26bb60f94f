"""Files of audio of all kinds, made with soundfile."""

import struct
from io import BytesIO

import numpy as np
import soundfile

Floats = np.ndarray[tuple[int, ...], np.dtype[np.float32]]


def voice(seconds: float, rate: int = 16_000, channels: int = 1, seed: int = 0) -> Floats:
    """Return tones that glide and pause, with a little noise: float32 [frames, channels]."""
    random = np.random.default_rng(seed)
    time = np.arange(round(seconds * rate)) / rate
    pitch = 140 + 60 * np.sin(2 * np.pi * 0.4 * time + random.uniform(0, 6))
    phase = 2 * np.pi * np.cumsum(pitch) / rate
    loudness = np.clip(np.sin(2 * np.pi * 0.7 * time) + 0.6, 0, 1)
    tone = sum(np.sin(harmonic * phase) / harmonic for harmonic in (1, 2, 3, 5))
    mono = 0.25 * loudness * tone + 0.003 * random.standard_normal(len(time))
    return np.stack([mono] * channels, axis=1).astype(np.float32)


def saved(samples: Floats, rate: int = 16_000, kind: str = "WAV", subtype: str | None = None) -> bytes:
    file = BytesIO()
    with soundfile.SoundFile(file, "w", rate, samples.shape[1], subtype, format=kind) as audio:
        for first in range(0, len(samples), 4096):  # one long write of Vorbis crashes libsndfile
            audio.write(samples[first : first + 4096])
    return file.getvalue()


def wav_claiming(file: bytes, data_bytes: int) -> bytes:
    """Return a WAV whose header claims another length."""
    return file[:40] + struct.pack("<I", data_bytes) + file[44:]


def flac_claiming(file: bytes, frames: int) -> bytes:
    """Return a FLAC whose STREAMINFO, after eight bytes, claims another number of frames: the low 36 bits of eight."""
    known = int.from_bytes(file[18:26], "big")
    return file[:18] + (known >> 36 << 36 | frames).to_bytes(8, "big") + file[26:]


def tagged(file: bytes, tag: int) -> bytes:
    """Return a file after an ID3v2 tag of some bytes."""
    length = bytes(tag >> 7 * place & 0x7F for place in (3, 2, 1, 0))
    return b"ID3\x04\0\0" + length + bytes(tag) + file
