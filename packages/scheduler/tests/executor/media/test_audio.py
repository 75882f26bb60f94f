"""Samples of audio clips are kept within bounds, as long as they are needed."""

import hashlib

import pytest

from tercet.protocol.messages.audio import AudioFormat, AudioInput, TranscriptTokens
from tercet.scheduler.executor.media.audio import AudioStore

TOKENS = TranscriptTokens(start=1, no_timestamps=2, first_timestamp=3, timestamp_seconds=0.02)
FORM = AudioFormat(rate=100, samples=4, tokens=TOKENS)
SAMPLES = [bytes([number, 1] * 4) for number in range(4)]
AUDIO = [AudioInput(sha256=hashlib.sha256(each).digest()) for each in SAMPLES]


def test_samples_that_do_not_fit_are_refused() -> None:
    store = AudioStore(FORM, most_bytes=16)
    for frames in ([], [SAMPLES[0], SAMPLES[1]], [b""], [SAMPLES[0][1:]], [SAMPLES[0] + SAMPLES[1]]):
        assert "do not fit" in store.add(AUDIO[0], frames)
    assert store.add(AUDIO[0], [memoryview(SAMPLES[0])]) == store.add(AUDIO[1], [SAMPLES[1][:6]]) == ""
    assert store.add(AUDIO[1], [SAMPLES[1][:6]]) == "", "it is there already"
    assert "too many" in store.add(AUDIO[2], [SAMPLES[2]])
    assert store.samples(AUDIO[0].sha256).tolist() == [256] * 4
    store.retain({AUDIO[0].sha256})
    assert store.add(AUDIO[2], [SAMPLES[2]]) == ""
    with pytest.raises(KeyError):
        store.samples(AUDIO[1].sha256)
