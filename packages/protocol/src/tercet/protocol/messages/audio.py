"""Audio in requests: the form in which a model takes it, and the tokens of transcripts. Since 1.1."""

from enum import StrEnum

import msgspec


class Transcript(StrEnum):
    """Kind of output, which decides what tokens a model may sample."""

    TEXT = "text"
    TIMESTAMPS = "timestamps"
    """Text in segments, each between two tokens of time."""
    LANGUAGE = "language"
    """One token: that of a language."""


class TranscriptTokens(msgspec.Struct, frozen=True, kw_only=True):
    """Ids of the tokens that a prompt for a transcript is made of."""

    start: int
    no_timestamps: int
    first_timestamp: int
    """Token of time 0; those of later times follow."""
    timestamp_seconds: float
    """Time between two tokens of time."""
    previous: int | None = None
    """Token before the text that precedes the audio."""
    transcribe: int | None = None
    """None for a model of one language, whose prompts name neither language nor task."""
    translate: int | None = None
    languages: dict[str, int] = {}
    """Token of each language, by its code."""


class AudioFormat(msgspec.Struct, frozen=True, kw_only=True):
    """Form of the audio that a model takes: int16 samples of one channel, little-endian."""

    rate: int
    """Samples per second."""
    samples: int
    """Maximum samples of a request."""
    tokens: TranscriptTokens


class AudioInput(msgspec.Struct, frozen=True, kw_only=True):
    """Audio that a request is about, whose samples are a raw frame of the message."""

    sha256: bytes
    """Hash of the samples, 32 bytes."""
    transcript: Transcript = Transcript.TEXT
