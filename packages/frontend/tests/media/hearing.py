"""Tiny model that takes audio."""

from collections.abc import Callable

import msgspec

from tercet.frontend.testing import FakeEngine
from tercet.protocol.messages.audio import AudioFormat, TranscriptTokens
from tercet.protocol.messages.values import ModelLimits

TOKENS = TranscriptTokens(
    start=1,
    no_timestamps=2,
    first_timestamp=100,
    timestamp_seconds=0.02,
    previous=3,
    transcribe=4,
    translate=5,
    languages={"en": 6, "de": 7},
)
FORM = AudioFormat(rate=16_000, samples=64_000, tokens=TOKENS)


def hearing(engine_of: Callable[..., FakeEngine], limits: ModelLimits, form: AudioFormat = FORM) -> FakeEngine:
    """Return an engine whose model takes four seconds of audio at once."""
    return engine_of(limits=msgspec.structs.replace(limits, audio=form))
