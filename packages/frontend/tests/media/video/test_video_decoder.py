"""Clips are decoded where they can do no harm."""

import asyncio
import contextlib
import os
import signal
import socket
from collections.abc import AsyncIterator
from fractions import Fraction
from io import BytesIO
from random import Random
from typing import Any

import msgspec
import numpy as np
import pytest

pytest.importorskip("av")

import av

from packages.frontend.tests.media.image_files import noise, saved
from packages.frontend.tests.media.video.video_files import data_url, frame, number_of, stills, video
from packages.frontend.tests.media.video.video_forms import JOINED, STAMPED
from tercet.frontend.errors import BadRequestError, UnavailableError
from tercet.frontend.media.image_worker import RefusedError
from tercet.frontend.media.video import files
from tercet.frontend.media.video.decoder import DecodedVideo, VideoDecoder, VideoSource, group_digest
from tercet.frontend.media.video.files import open_clip
from tercet.frontend.media.video.pipe import FrameGroup, ReadVideo
from tercet.frontend.media.video.worker import clip_groups
from tercet.protocol.damage import damaged
from tercet.protocol.messages.video import VideoFormat

PARAM = "messages[0].content[1]"
GOOD = video(20)


@pytest.fixture
async def decoder() -> AsyncIterator[VideoDecoder]:
    made = VideoDecoder(workers=1)
    yield made
    await made.close()


async def decoded(decoder: VideoDecoder, url: str, form: VideoFormat = STAMPED) -> DecodedVideo:
    return await decoder.decode(VideoSource(url=url, param=PARAM), form)


async def refusal(decoder: VideoDecoder, url: str) -> str:
    with pytest.raises(BadRequestError) as error:
        await decoded(decoder, url)
    assert error.value.param == PARAM
    return error.value.message


def groups_in(file: bytes, form: VideoFormat = STAMPED) -> list[FrameGroup]:
    return list(clip_groups(ReadVideo(file=file, form=form, seconds=5)))


def numbers_in(groups: list[FrameGroup]) -> list[int]:
    """Return the numbers of the frames of groups."""
    arrays = [np.frombuffer(each.array, np.uint8).reshape(2, each.height, each.width, 3) for each in groups]
    return [number_of(each) for array in arrays for each in array]


KINDS: dict[str, dict[str, Any]] = {
    "MP4": {},
    "MP4 with short groups of pictures": {"options": {"g": "5", "bf": "3"}},
    "MKV": {"kind": "matroska", "options": {"g": "7"}},
    "WebM": {"kind": "webm", "codec": "libvpx-vp9", "options": {"deadline": "realtime", "cpu-used": "8", "g": "6"}},
}


@pytest.mark.parametrize("name", KINDS)
def test_sampled_frames_equal_those_of_a_whole_decoding(name: str) -> None:
    file = video(40, **KINDS[name])
    chosen = [3, 3, 9, 17, 18, 30, 31, 39]
    with av.open(BytesIO(file), "r") as container:
        whole = [each.to_ndarray(format="rgb24") for each in container.decode(video=0)]
    clip = open_clip(file)
    assert (clip.frames, clip.per_second) == (40, 10)
    for number, image in zip(chosen, clip.images(chosen), strict=True):
        np.testing.assert_array_equal(np.asarray(image), whole[number])


def test_files_without_times_are_decoded_in_order() -> None:
    clip = open_clip(video(20, kind="avi", codec="mpeg4"))
    assert isinstance(clip, files.VideoFile)
    clip._times = None
    shown = [number_of(np.asarray(image)) for image in clip.images([2, 2, 19])]
    assert shown[0] == shown[1] < 6 < 14 < shown[2]


def test_groups_have_their_times() -> None:
    stamped = groups_in(GOOD)
    assert [each.seconds for each in stamped] == pytest.approx([0.3, 1.6])  # frames 0, 6, 13 and 19
    assert numbers_in(stamped) == pytest.approx([0, 6, 13, 19], abs=2)
    joined = groups_in(video(40), JOINED)
    assert [each.time for each in joined] == [0, 2, 4, 6]
    assert {(each.height, each.width, len(each.array)) for each in joined} == {(64, 96, 2 * 64 * 96 * 3)}


def test_animated_images_are_clips() -> None:
    target = BytesIO()
    first, *more = [frame(number) for number in range(12)]
    first.save(target, "WEBP", save_all=True, append_images=more, duration=250, lossless=True)
    groups = groups_in(target.getvalue())
    assert [each.seconds for each in groups] == [0.25, 1.375, 2.5]  # frames 0, 2, 4, 7, 9 and 11, at four a second
    assert numbers_in(groups)[0] == 0
    assert numbers_in(groups)[-1] == 11


async def test_frames_in_a_url_are_all_shown(decoder: VideoDecoder) -> None:
    clip = await decoded(decoder, stills([frame(number) for number in range(5)], "PNG"))
    assert [each.seconds for each in clip.groups] == [0.25, 1.25, 2.0], "two frames a second, and the last one twice"
    array = np.frombuffer(clip.groups[1].array, np.uint8).reshape(2, 64, 96, 3)
    np.testing.assert_array_equal(array, [np.asarray(frame(2)), np.asarray(frame(3))])


async def test_arrays_and_their_hashes_come_from_a_helper(decoder: VideoDecoder) -> None:
    clip = await decoded(decoder, data_url(GOOD))
    expected = groups_in(GOOD)
    assert [each.array for each in clip.groups] == [each.array for each in expected]
    assert [each.sha256 for each in clip.groups] == [group_digest(each) for each in expected]
    assert await decoded(decoder, data_url(GOOD)) == clip


def test_groups_of_other_sizes_have_other_hashes() -> None:
    sizes = [(2, 3), (3, 2), (1, 6)]
    digests = {group_digest(FrameGroup(array=bytes(36), height=height, width=width)) for height, width in sizes}
    assert len(digests) == len(sizes)


def audio_only() -> bytes:
    target = BytesIO()
    with av.open(target, "w", format="mp4") as container:
        stream = container.add_stream("aac", rate=8000)
        sound = av.AudioFrame.from_ndarray(np.zeros((1, 8000), np.float32), format="fltp", layout="mono")
        sound.sample_rate = 8000
        container.mux([*stream.encode(sound), *stream.encode()])
    return target.getvalue()


def hours() -> bytes:
    """Return a file of three frames that claims to last three hours."""
    target = BytesIO()
    with av.open(target, "w", format="mp4") as container:
        stream: Any = container.add_stream("mpeg4", rate=Fraction(1, 3600))
        stream.width, stream.height, stream.pix_fmt = 32, 32, "yuv420p"
        for number in range(3):
            container.mux(stream.encode(av.VideoFrame.from_ndarray(np.asarray(frame(number, 32, 32)), format="rgb24")))
        container.mux(stream.encode())
    return target.getvalue()


PLAYLISTS = {
    "HLS of a local file": "#EXTM3U\n#EXT-X-TARGETDURATION:9\n#EXTINF:9,\nfile:///etc/hostname\n#EXT-X-ENDLIST\n",
    "HLS of a URL": "#EXTM3U\n#EXT-X-TARGETDURATION:9\n#EXTINF:9,\nhttp://127.0.0.1:{port}/a.ts\n#EXT-X-ENDLIST\n",
    "concat": "ffconcat version 1.0\nfile /etc/hostname\n",
    "DASH": '<MPD xmlns="urn:mpeg:dash:schema:mpd:2011"><BaseURL>http://127.0.0.1:{port}/</BaseURL></MPD>',
    "SDP": "v=0\no=- 0 0 IN IP4 127.0.0.1\nc=IN IP4 127.0.0.1\nm=video {port} RTP/AVP 96\n",
}
FILES = {
    "text": (b"no video", "it is none of MP4"),
    "nothing": (b"", "it is none of MP4"),
    "image": (saved(noise(9, 9)), "it is none of MP4"),
    "head only": (GOOD[:200], "it is damaged"),
    "end only": (GOOD[:4] + b"ftyp" + GOOD[-300:], "it is damaged"),
    "playlist after the head of MP4": (b"\0\0\0\x18ftypisom" + PLAYLISTS["HLS of a local file"].encode(), "it is"),
    "no video": (audio_only(), "it has no video"),
    "another codec": (video(3, kind="matroska", codec="ffv1"), "its codec ffv1 is none of h264"),
    "hours": (hours(), "it has 10800 s, and at most 7200 are read"),
    "narrow": (video(4, size=(16, 3600), options={"preset": "ultrafast"}), "no side may be 200 times as long"),
    "giant frames": (
        video(1, size=(4112, 4112), blank=True, options={"preset": "ultrafast"}),
        "its frames have 16908544 pixels, and at most 16777216 are decoded",
    ),
}


@pytest.mark.parametrize("name", FILES)
async def test_files_that_are_no_clips_are_refused(decoder: VideoDecoder, name: str) -> None:
    file, why = FILES[name]
    assert why in await refusal(decoder, data_url(file))
    assert await decoded(decoder, data_url(GOOD)), "the same helper goes on"


@pytest.mark.parametrize("name", PLAYLISTS)
async def test_playlists_are_refused_and_name_nothing_that_is_opened(decoder: VideoDecoder, name: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.setblocking(False)
        file = PLAYLISTS[name].replace("{port}", str(server.getsockname()[1])).encode()
        assert "it is none of MP4" in await refusal(decoder, data_url(file, "application/vnd.apple.mpegurl"))
        with pytest.raises(BlockingIOError):
            server.accept()


@pytest.mark.parametrize("cut", [0.5, 0.7, 0.9, 0.99])
def test_a_truncated_file_is_refused_or_shows_what_it_has(cut: float) -> None:
    whole = video(40, kind="matroska", options={"g": "8"})
    try:
        groups = groups_in(whole[: int(cut * len(whole))])
    except (RefusedError, av.FFmpegError):
        return
    assert {len(each.array) for each in groups} == {2 * 64 * 96 * 3}


async def test_damaged_files_are_refused_or_decoded(decoder: VideoDecoder) -> None:
    kinds = [GOOD, video(12, kind="matroska"), video(12, kind="avi", codec="mpeg4")]
    for seed in range(60):
        file = damaged(kinds[seed % len(kinds)], Random(seed))
        with contextlib.suppress(BadRequestError):
            clip = await decoded(decoder, data_url(file))
            assert {len(each.array) for each in clip.groups} == {2 * 3 * clip.groups[0].height * clip.groups[0].width}
    assert await decoded(decoder, data_url(GOOD))


URLS = {
    "data:video/mp4,abc": "no ';base64,'",
    "data:video/mp4;base64,%%%": "it is no base64",
    "data:video/jpeg;base64,": "it is none of PNG",
    "data:video/jpeg;base64,!,!": "it is no base64",
    "file:///etc/hostname": "Videos are read from 'data:' URLs only",
    "/etc/hostname": "Videos are read from 'data:' URLs only",
    "http://127.0.0.1/a.mp4": "Videos are read from 'data:' URLs only",
    "concat:/etc/hostname": "Videos are read from 'data:' URLs only",
    stills([frame(0), frame(1, 64, 96)]): "its frames have several sizes",
    stills([noise(2, 2)] * 769): "it has 769 frames, and at most 768 are read",
}


@pytest.mark.parametrize("url", URLS, ids=lambda url: url[:30] + url[-5:])
async def test_other_urls_are_refused(decoder: VideoDecoder, url: str) -> None:
    assert URLS[url] in await refusal(decoder, url)


async def test_of_ten_thousand_frames_only_some_are_decoded() -> None:
    decoder = VideoDecoder(workers=1, seconds=2.0)
    file = video(10_000, rate=100, size=(32, 32), codec="mpeg4", blank=True, options={"g": "50"})
    clip = await decoded(decoder, data_url(file))
    assert len(clip.groups) == STAMPED.sampling.max_frames // 2
    assert clip.groups[-1].seconds == pytest.approx(97.8, abs=0.1)
    await decoder.close()


def test_files_of_more_frames_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "MAX_FRAMES", 19)
    with pytest.raises(RefusedError, match="it has more than 19 frames"):
        open_clip(GOOD)


async def test_long_clips_of_tiny_frames_are_refused(decoder: VideoDecoder) -> None:
    slow = video(8, rate=1, size=(16, 16))
    with pytest.raises(BadRequestError, match="it is too long for the size of its frames"):
        await decoded(decoder, data_url(slow), msgspec.structs.replace(JOINED, positions_per_second=50.0))


async def test_a_clip_that_takes_too_long_ends_its_helper() -> None:
    decoder = VideoDecoder(workers=1, seconds=0.02)
    assert "takes too long" in await refusal(decoder, data_url(video(240, size=(640, 480), blank=True)))
    assert decoder.pids == []
    await decoder.close()


async def test_a_killed_helper_is_replaced(decoder: VideoDecoder) -> None:
    clip = await decoded(decoder, data_url(GOOD))
    [pid] = decoder.pids
    os.kill(pid, signal.SIGKILL)
    assert await decoded(decoder, data_url(GOOD)) == clip
    assert decoder.pids != [pid]


async def test_more_clips_than_may_wait_are_refused() -> None:
    decoder = VideoDecoder(workers=1, max_waiting=1)
    results = await asyncio.gather(*(decoded(decoder, data_url(GOOD)) for _ in range(3)), return_exceptions=True)
    assert [type(each) for each in results] == [DecodedVideo, DecodedVideo, UnavailableError]
    await decoder.close()
