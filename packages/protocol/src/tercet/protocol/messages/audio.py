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
    SPEECH = "speech"
    """One token of any kind: that of audio without speech, or another."""
    TIMES = "times"
    """One token. The prompt has the text; `Logprobs.times` of the prompt has the time of each of its tokens."""


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
    no_speech: int | None = None
    """Token of audio without speech; None if the model has none."""
    languages: dict[str, int] = {}
    """Token of each language, by its code."""


class AudioFormat(msgspec.Struct, frozen=True, kw_only=True):
    """Form of the audio that a model takes: int16 samples of one channel, little-endian."""

    rate: int
    """Samples per second."""
    samples: int
    """Maximum samples of a request."""
    tokens: TranscriptTokens
    token_times: bool = False
    """The scheduler answers requests of `Transcript.TIMES`."""


class AudioInput(msgspec.Struct, frozen=True, kw_only=True):
    """Audio that a request is about, whose samples are a raw frame of the message."""

    sha256: bytes
    """Hash of the samples, 32 bytes."""
    transcript: Transcript = Transcript.TEXT


class SoundFormat(msgspec.Struct, frozen=True, kw_only=True):
    """Form of the sounds in prompts of a language model that hears: int16 samples of one channel, little-endian.

    A placeholder token stands for `2 * pooled` features of a sound, in whose place the model gets an embedding.
    """

    rate: int
    """Samples per second."""
    hop: int
    """Samples from one feature to the next."""
    samples: int
    """Maximum samples of a sound."""
    marker: str
    """Text that the chat template writes for a sound."""
    token: str
    """Text of a placeholder token."""
    token_id: int
    pooled: int = 2
    """Positions of the encoder, of two features each, in a token."""
    window: int = 0
    """Samples that the encoder sees at once, to whole multiples of which a sound is padded; 0 without padding."""
    transcription: str = ""
    """Prompt for the transcript of a sound, with the marker, and `{language}` in the place of a language as `lang:en`.
    Empty if the model has none."""

    @property
    def max_tokens(self) -> int:
        """Return the maximum tokens of a sound."""
        return self.embeddings(self.samples)

    @property
    def least_samples(self) -> int:
        """Return the samples of the shortest sound that has a token."""
        return 1 if self.window else 2 * self.hop + 1

    def fits(self, samples: int) -> bool:
        """Return whether a sound may have so many samples."""
        return self.least_samples <= samples <= self.samples

    def embeddings(self, samples: int) -> int:
        """Return the number of embeddings, and so of placeholder tokens, of a sound."""
        return self.positions(samples) // self.pooled

    def positions(self, samples: int) -> int:
        """Return the number of positions of the encoder, before they are pooled."""
        if self.window:
            samples = self.windows(samples) * self.window
        features = -(-samples // self.hop)
        return (features + 1) // 2

    def windows(self, samples: int) -> int:
        """Return the number of windows of a sound that is padded."""
        return -(-samples // self.window)


class SoundInput(msgspec.Struct, frozen=True, kw_only=True):
    """Sound in a prompt, whose samples are a raw frame of the message."""

    sha256: bytes
    """Hash of the samples, 32 bytes."""
    samples: int
    first: int
    """Index of its first placeholder token in the prompt."""
    tokens: int
    """Number of its placeholder tokens."""

    @property
    def array_bytes(self) -> int:
        """Return the size of the samples in bytes."""
        return 2 * self.samples
