"""Samples of sounds are kept within bounds, as long as they are needed."""

import hashlib

import pytest

from tercet.protocol.messages.sound import SoundFormat, SoundInput, TranscriptTokens
from tercet.scheduler.executor.media.sounds import SoundStore

TOKENS = TranscriptTokens(start=1, no_timestamps=2, first_timestamp=3, timestamp_seconds=0.02)
FORM = SoundFormat(rate=100, samples=4, tokens=TOKENS)
SAMPLES = [bytes([number, 1] * 4) for number in range(4)]
SOUNDS = [SoundInput(sha256=hashlib.sha256(each).digest()) for each in SAMPLES]


def test_samples_that_do_not_fit_are_refused() -> None:
    store = SoundStore(FORM, most_bytes=16)
    for frames in ([], [SAMPLES[0], SAMPLES[1]], [b""], [SAMPLES[0][1:]], [SAMPLES[0] + SAMPLES[1]]):
        assert "do not fit" in store.add(SOUNDS[0], frames)
    assert store.add(SOUNDS[0], [memoryview(SAMPLES[0])]) == store.add(SOUNDS[1], [SAMPLES[1][:6]]) == ""
    assert store.add(SOUNDS[1], [SAMPLES[1][:6]]) == "", "it is there already"
    assert "too many" in store.add(SOUNDS[2], [SAMPLES[2]])
    assert store.samples(SOUNDS[0].sha256).tolist() == [256] * 4
    store.retain({SOUNDS[0].sha256})
    assert store.add(SOUNDS[2], [SAMPLES[2]]) == ""
    with pytest.raises(KeyError):
        store.samples(SOUNDS[1].sha256)
