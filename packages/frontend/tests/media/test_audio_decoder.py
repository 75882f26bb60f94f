"""Audio is decoded where it can do no harm."""

import asyncio
import hashlib
import os
import random
import signal
from base64 import b64encode
from collections.abc import AsyncIterator

import numpy as np
import pytest

pytest.importorskip("soundfile")
pytest.importorskip("soxr")

import soxr

from packages.frontend.tests.media.audio_files import Floats, flac_claiming, saved, tagged, voice, wav_claiming
from tercet.frontend.errors import BadRequestError, UnavailableError
from tercet.frontend.media import audio_worker
from tercet.frontend.media.audio_decoder import AudioDecoder, DecodedAudio
from tercet.frontend.media.audio_pipe import ReadAudio

RATE, WINDOW = 16_000, 480_000
GOOD = saved(voice(1))
STEREO = voice(1, channels=2) * np.array([1, 0.5], np.float32)


@pytest.fixture
async def decoder() -> AsyncIterator[AudioDecoder]:
    made = AudioDecoder(workers=1)
    yield made
    await made.close()


async def decoded(decoder: AudioDecoder, file: bytes) -> list[DecodedAudio]:
    return await decoder.decode(file, RATE, WINDOW, "file")


async def refusal(decoder: AudioDecoder, file: bytes) -> str:
    with pytest.raises(BadRequestError) as error:
        await decoded(decoder, file)
    assert error.value.param == "file"
    return error.value.message


def windows(file: bytes) -> list[Floats]:
    order = ReadAudio(file=file, rate=RATE, window=WINDOW, seconds=1)
    return [each.astype(np.float32) / np.float32(32_768) for each in audio_worker.audio_windows(order)]


def error(file: bytes, expected: Floats) -> float:
    """Return the largest error of an audio clip of one window."""
    [window] = windows(file)
    assert len(window) == len(expected)
    return float(np.abs(window - expected).max())


WIDTHS = ["PCM_U8", "PCM_16", "PCM_24", "PCM_32", "FLOAT", "DOUBLE", "ULAW", "ALAW"]


@pytest.mark.parametrize("subtype", WIDTHS)
def test_samples_of_all_widths_become_16_bits(subtype: str) -> None:
    most = {"PCM_U8": 0.01, "ULAW": 0.02, "ALAW": 0.02}.get(subtype, 4e-5)
    assert error(saved(voice(1), subtype=subtype), voice(1)[:, 0]) < most


@pytest.mark.parametrize("channels", [2, 3, 6, 8])
def test_channels_are_mixed(channels: int) -> None:
    audio = voice(1, channels=channels) * np.linspace(1, 0, channels, dtype=np.float32)
    assert error(saved(audio), audio.mean(axis=1)) < 5e-5


@pytest.mark.parametrize("rate", [1000, 8000, 11_025, 12_345, 22_050, 44_100, 48_000, 96_000, 192_000])
def test_odd_rates_are_resampled(rate: int) -> None:
    audio = voice(1, rate)
    expected = soxr.resample(audio[:, 0], rate, RATE).clip(-1, 1)
    assert error(saved(audio, rate, subtype="FLOAT"), expected) < 5e-5


@pytest.mark.parametrize(
    ("kind", "subtype"), [("RF64", None), ("FLAC", None), ("OGG", "VORBIS"), ("OGG", "OPUS"), ("MP3", None)]
)
def test_further_formats_are_read(kind: str, subtype: str | None) -> None:
    assert error(saved(voice(1), kind=kind, subtype=subtype), voice(1)[:, 0]) < 0.3


def test_one_sample_is_audio() -> None:
    assert [len(each) for each in windows(saved(voice(1)[:1]))] == [1]


async def test_a_long_sound_comes_whole_in_parts(decoder: AudioDecoder) -> None:
    audio = voice(95)[:, 0]
    file = b64encode(saved(audio[:, None], subtype="PCM_16")).decode()
    heard = np.frombuffer(await decoder.decode_sound(file, RATE, len(audio), "sound"), "<i2")
    assert len(heard) == len(audio)
    assert np.abs(heard / np.float32(32_768) - audio).max() < 4e-5
    with pytest.raises(BadRequestError, match="at most 94"):
        await decoder.decode_sound(file, RATE, len(audio) - 1, "sound")


def test_a_tag_before_the_audio_is_skipped() -> None:
    file = saved(voice(1), kind="MP3")
    assert np.array_equal(windows(tagged(file, 100_000)), windows(file))


def test_loud_samples_are_cut_off() -> None:
    [window] = windows(saved(np.array([[3.0], [-3.0], [0.5]], np.float32), subtype="FLOAT"))
    assert window.tolist() == [32_767 / 32_768, -1, 0.5]


def test_long_audio_is_cut_where_it_is_quiet() -> None:
    audio = voice(95)
    parts = windows(saved(audio, subtype="PCM_16"))
    assert np.abs(np.concatenate(parts) - audio[:, 0]).max() < 4e-5
    assert [28 * RATE <= len(part) <= WINDOW for part in parts] == [True, True, True, False]
    ends = np.cumsum([len(part) for part in parts])[:-1]
    assert max(np.abs(audio[end - 800 : end + 800]).max() for end in ends) < 0.1 < np.abs(audio[:WINDOW]).max()


@pytest.mark.parametrize(("seconds", "count"), [(30, 1), (30.001, 1), (30.2, 2)])
def test_a_rest_that_holds_no_word_is_left_out(seconds: float, count: int) -> None:
    loud = np.full((round(seconds * RATE), 1), 0.5, np.float32)
    loud[WINDOW - 100 : WINDOW + 100] = 0
    assert len(windows(saved(loud))) == count


BAD = {
    "no bytes": (b"", "none of WAV"),
    "a text": (b"no audio", "none of WAV"),
    "an AIFF": (saved(voice(0.1), kind="AIFF"), "none of WAV"),
    "an AIFF after a tag": (tagged(saved(voice(0.1), kind="AIFF"), 9), "none of WAV"),
    "a tag alone": (b"ID3\x04\0\0\x7f\x7f\x7f\x7f", "none of WAV"),
    "a header alone": (GOOD[:44], "no samples"),
    "half a header": (GOOD[:30], "damaged"),
    "a FLAC that is cut off": (saved(voice(1), kind="FLAC")[:-900], "damaged"),
    "an OGG of one page": (saved(voice(1), kind="OGG")[:100], "damaged"),
    "an MP3 of half a frame": (saved(voice(1), kind="MP3")[:100], "damaged"),
    "9 channels": (saved(voice(0.1, channels=9)), "9 channels"),
    "999 samples a second": (saved(voice(0.1), 999), "999 samples a second"),
    "no rate": (GOOD[:24] + bytes(4) + GOOD[28:], "damaged"),
    "no channels": (GOOD[:22] + bytes(2) + GOOD[24:], "damaged"),
    "no numbers": (saved(np.full((9, 1), np.nan, np.float32), subtype="FLOAT"), "no numbers"),
    "a FLAC that claims days": (flac_claiming(saved(voice(1), kind="FLAC"), 1 << 35), "2147484 s, and"),
    "hours in little": (saved(np.zeros((7201 * 1000, 1), np.float32), 1000, "FLAC"), "7201 s, and"),
}


async def test_a_bad_file_costs_its_sender_a_400(decoder: AudioDecoder) -> None:
    refusals = {name: await refusal(decoder, file) for name, (file, _) in BAD.items()}
    assert {name: refusals[name] for name, (_, why) in BAD.items() if why not in refusals[name]} == {}
    [pid] = decoder.pids
    await decoded(decoder, GOOD)
    assert decoder.pids == [pid], "the helper lives on"


@pytest.mark.parametrize("claimed", [0xFFFFFFF0, 0xFFFFFFFF, 44 + 7200 * 32_000])
async def test_of_a_wav_that_claims_hours_its_samples_are_read(decoder: AudioDecoder, claimed: int) -> None:
    assert await decoded(decoder, wav_claiming(GOOD, claimed)) == await decoded(decoder, GOOD)


def test_a_header_that_claims_less_bounds_the_audio() -> None:
    claiming = flac_claiming(saved(voice(3), kind="FLAC"), 16_000)
    assert sum(map(len, windows(claiming))) <= 16_000


async def test_windows_and_hashes_come_from_a_helper(decoder: AudioDecoder) -> None:
    file = saved(voice(31))
    found = await decoded(decoder, file)
    expected = [(each * 32_768).astype(np.int16).tobytes() for each in windows(file)]
    assert [each.samples for each in found] == expected
    assert [each.sha256 for each in found] == [hashlib.sha256(each).digest() for each in expected]
    assert len(await decoded(decoder, GOOD)) == 1, "the next file begins anew"


async def test_audio_that_takes_too_long_ends_its_helper() -> None:
    decoder = AudioDecoder(workers=1, seconds=0.02)
    assert "takes too long" in await refusal(decoder, saved(np.zeros((600 * 48_000, 1), np.float32), 48_000, "FLAC"))
    assert decoder.pids == []
    await decoder.close()


def test_audio_that_takes_too_much_memory_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr(audio_worker, "_open", fail)
    order = ReadAudio(file=GOOD, rate=RATE, window=WINDOW, seconds=1)
    assert audio_worker._next(audio_worker.audio_windows(order)).error == "it takes too much memory to decode"


async def test_a_killed_helper_is_replaced(decoder: AudioDecoder) -> None:
    expected = await decoded(decoder, GOOD)
    for milliseconds in (0, 1, 3):
        [pid] = decoder.pids
        os.kill(pid, signal.SIGKILL)
        await asyncio.sleep(milliseconds / 1000)
        assert await decoded(decoder, GOOD) == expected
        assert decoder.pids != [pid]


async def test_more_files_than_may_wait_are_refused() -> None:
    decoder = AudioDecoder(workers=1, max_waiting=1)
    results = await asyncio.gather(*(decoded(decoder, GOOD) for _ in range(3)), return_exceptions=True)
    assert [type(each) for each in results] == [list, list, UnavailableError]
    await decoder.close()


def mutated(file: bytes, chance: random.Random) -> bytes:
    """Return a file with some other bytes, most of them near the start, and perhaps cut off."""
    changed = bytearray(file)
    for _ in range(chance.choice((1, 2, 5, 30))):
        changed[chance.randrange(min(len(file), chance.choice((64, 400, len(file)))))] = chance.randrange(256)
    return bytes(changed[: chance.randrange(len(file)) if chance.random() < 0.2 else None])


async def test_mutated_files_are_read_or_refused(decoder: AudioDecoder) -> None:
    formats = [("WAV", None), ("WAV", "FLOAT"), ("FLAC", None), ("OGG", "VORBIS"), ("OGG", "OPUS"), ("MP3", None)]
    files = [saved(voice(0.5, channels=2), kind=kind, subtype=subtype) for kind, subtype in formats]
    chance, refused = random.Random(1), []
    for number in range(240):
        try:
            await decoded(decoder, mutated(files[number % len(files)], chance))
        except BadRequestError as error:
            refused.append(error.message)
    assert 60 < len(refused) < 220
    assert not [message for message in refused if "takes too" in message]
    assert len(decoder.pids) == 1
