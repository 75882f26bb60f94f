"""Clips of chats and of /generate reach schedulers as groups of frames; other routes refuse them by name."""

from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx2
import msgspec
import pytest
from tokenizers import Tokenizer

pytest.importorskip("av")
pytest.importorskip("httpcore2")

from packages.frontend.tests.media.hosts import internet, response
from packages.frontend.tests.media.image_files import data_url as image_url
from packages.frontend.tests.media.image_files import noise, saved
from packages.frontend.tests.media.resending import sent_twice
from packages.frontend.tests.media.seeing import TEMPLATE, image, text, user
from packages.frontend.tests.media.video.video_files import data_url, frame, stills, video
from packages.frontend.tests.media.video.video_forms import JOINED, STAMPED
from tercet.frontend.config.validation import read_media_hosts
from tercet.frontend.media.image_fetcher import ImageFetcher
from tercet.frontend.media.video.decoder import VideoDecoder
from tercet.frontend.testing import FakeEngine, Served, serving
from tercet.protocol.messages.media import FixedSize, ImageFormat
from tercet.protocol.messages.values import ModelLimits, unpack_ints
from tercet.protocol.messages.video import VideoFormat

HttpOf = Callable[[Served], httpx2.AsyncClient]
CLIP = data_url(video(20))
CAT = image_url(saved(noise(20, 30)))
URL = "http://images.example.org/clip.mp4"
GROUP = 4 * 6
"""Tokens of a group."""


def watching(
    engine_of: Callable[..., FakeEngine],
    files: dict[str, bytes],
    limits: ModelLimits,
    tokenizer: Tokenizer,
    form: VideoFormat = STAMPED,
) -> FakeEngine:
    """Return an engine whose model takes images of three tokens, and clips."""
    shown, watched = (tokenizer.token_to_id(name) for name in ("</s>", "<|im_end|>"))
    assert shown is not None
    assert watched is not None
    images = ImageFormat(
        size=FixedSize(height=2, width=6),
        patch=2,
        resample=2,
        marker="<|endoftext|>",
        token="</s>",
        token_id=shown,
        max_tokens=3,
    )
    own = {"marker": "<s>", "token": "<|im_end|>", "token_id": watched, "prefix": "(", "suffix": ")"}
    video_form = msgspec.structs.replace(form, **(own if form.stamp else own | {"prefix": "", "suffix": ""}))
    template = TEMPLATE.replace("{% else %}{{ part", "{% elif part['type'] == 'video' %}<s>{% else %}{{ part")
    template = template.replace("<|im_end|>\\n", "\\n").replace("<|im_end|>\n", "\n")
    files = {**files, "chat_template.jinja": template.encode()}
    return engine_of(files=files, limits=msgspec.structs.replace(limits, images=images, video=video_form))


@pytest.fixture
def engine(
    engine_of: Callable[..., FakeEngine], files: dict[str, bytes], limits: ModelLimits, tokenizer: Tokenizer
) -> FakeEngine:
    limits = msgspec.structs.replace(limits, context_length=512, max_total_tokens=512)
    return watching(engine_of, files, limits, tokenizer)


@pytest.fixture
async def served(engine: FakeEngine) -> AsyncIterator[Served]:
    async with serving(engine) as running:
        yield running


def clip(url: str = CLIP) -> dict[str, Any]:
    return {"type": "video_url", "video_url": {"url": url}}


async def test_a_chat_has_clips_beside_images(served: Served, engine: FakeEngine, http_of: HttpOf) -> None:
    http = http_of(served)
    body = {"model": "tiny", "messages": [user(text("see"), clip(), image(CAT), text("this"), clip())]}
    answer = (await http.post("/v1/chat/completions", json=body)).json()
    [sent] = engine.requests()
    assert [(each.frames, each.clip, each.time, each.tokens) for each in sent.images] == [
        *[(2, -1, 0, GROUP)] * 2,
        (0, -1, 0, 3),
        *[(2, -1, 0, GROUP)] * 2,
    ]
    first, second, _, third, fourth = sent.images
    assert (first.sha256, second.sha256) == (third.sha256, fourth.sha256)
    assert first.first + GROUP < second.first, "a time stands between groups"
    details = answer["usage"]["prompt_tokens_details"]
    assert (details["video_tokens"], details["image_tokens"]) == (4 * GROUP, 3)
    tokenized = await http.post("/tokenize", json=body)
    assert tokenized.json()["count"] == answer["usage"]["prompt_tokens"] == len(unpack_ints(sent.input_ids))


async def test_groups_that_follow_each_other_have_times(
    engine_of: Callable[..., FakeEngine],
    files: dict[str, bytes],
    limits: ModelLimits,
    tokenizer: Tokenizer,
    http_of: HttpOf,
) -> None:
    limits = msgspec.structs.replace(limits, context_length=512, max_total_tokens=512)
    engine = watching(engine_of, files, limits, tokenizer, JOINED)
    async with serving(engine) as served:
        body = {"model": "tiny", "messages": [user(text("see"), clip(), clip())]}
        assert (await http_of(served).post("/v1/chat/completions", json=body)).status_code == 200
    [sent] = engine.requests()
    starts = [each.first for each in sent.images]
    assert [each.time for each in sent.images] == [0, 2, 0, 2]
    assert [each.clip for each in sent.images] == [starts[0], starts[0], starts[2], starts[2]]
    assert starts[1] - starts[0] == starts[3] - starts[2] == GROUP


async def test_a_request_with_a_clip_is_sent_again_whole(served: Served, engine: FakeEngine, http_of: HttpOf) -> None:
    body = {"model": "tiny", "messages": [user(clip())], "max_tokens": 5}
    first, again = await sent_twice(engine, http_of(served).post("/v1/chat/completions", json=body))
    assert first.images == again.images
    assert len(first.images) == 2


async def test_a_text_has_clips_and_images_in_any_order(served: Served, engine: FakeEngine, http_of: HttpOf) -> None:
    http = http_of(served)
    body = {"text": "a<s>b<|endoftext|>c<s>", "image_data": CAT, "video_data": [CLIP, CLIP.partition(",")[2]]}
    assert (await http.post("/generate", json=body)).status_code == 200
    several = {"text": ["<s>", "blind"], "video_data": [[CLIP], None]}
    assert (await http.post("/generate", json=several)).status_code == 200
    mixed, watched, blind = engine.requests()
    assert [each.frames for each in mixed.images] == [2, 2, 0, 2, 2]
    assert [len(each.images) for each in (watched, blind)] == [2, 0]


async def test_frames_in_a_url_are_a_clip(served: Served, engine: FakeEngine, http_of: HttpOf) -> None:
    body = {"model": "tiny", "messages": [user(clip(stills([frame(number) for number in range(6)])))]}
    assert (await http_of(served).post("/v1/chat/completions", json=body)).status_code == 200
    assert [each.frames for each in engine.requests()[0].images] == [2, 2, 2]


async def test_clips_come_from_allowed_hosts(served: Served, engine: FakeEngine, http_of: HttpOf) -> None:
    async with internet(response(video(20))) as net:
        fetcher = ImageFetcher(read_media_hosts(["images.example.org"]), net.resolve, net)
        served.manager.videos = VideoDecoder(workers=1, fetcher=fetcher)
        body = {"model": "tiny", "messages": [user(clip(URL), clip(URL))]}
        assert (await http_of(served).post("/v1/chat/completions", json=body)).status_code == 200
        refused = {"model": "tiny", "messages": [user(clip("http://other.example.org/a.mp4"))]}
        error = (await http_of(served).post("/v1/chat/completions", json=refused)).json()["error"]
    assert len(net.connected) == 1
    assert len(engine.requests()[0].images) == 4
    assert (error["code"], error["param"]) == ("invalid_video_url", "messages[0].content[0]")
    assert "The video is refused: its host is not one" in error["message"]


BROKEN = data_url(b"\0\0\0\x18ftypisom no clip")
REFUSED: list[tuple[str, dict[str, Any], str, str]] = [
    ("/v1/chat/completions", {"messages": [user(clip(BROKEN))]}, "messages[0].content[0]", "The video is refused"),
    ("/v1/chat/completions", {"messages": [user(*[clip()] * 33)]}, "messages", "At most 32 videos"),
    ("/v1/chat/completions", {"messages": [{"role": "system", "content": [clip()]}]}, "messages[0].content[0]", "not"),
    ("/v1/chat/completions", {"messages": [user({"type": "video", "video": []})]}, "messages[0].content[0]", "'video'"),
    ("/v1/responses", {"input": [user({"type": "input_video"})]}, "input[0].content[0]", "input_video"),
    ("/generate", {"text": "blind", "video_data": CLIP}, "video_data", "'<s>' for each of its 1"),
    ("/generate", {"text": ["<s>"], "video_data": CLIP}, "video_data", "of each prompt"),
    ("/generate", {"text": "<s>", "video_data": [[CLIP]]}, "video_data", "a video or a list"),
    ("/generate", {"input_ids": [1], "video_data": CLIP}, "video_data", "Videos go with a 'text'"),
    ("/generate", {"text": "<s><|im_end|>", "video_data": CLIP}, "text", "besides"),
]


async def test_clips_out_of_place_are_refused(served: Served, engine: FakeEngine, http_of: HttpOf) -> None:
    for path, body, param, why in REFUSED:
        given = body if path == "/generate" else {"model": "tiny", **body}
        answer = await http_of(served).post(path, json=given)
        error = answer.json()["error"]
        assert (answer.status_code, error["param"]) == (400, param), error
        assert why in error["message"], error
    message = {"model": "tiny", "max_tokens": 9, "messages": [user({"type": "video", "source": {}})]}
    answer = await http_of(served).post("/v1/messages", json=message)
    assert answer.status_code == 400
    assert engine.requests() == []


async def test_a_model_without_clips_says_what_it_takes(
    engine_of: Callable[..., FakeEngine], limits: ModelLimits, http_of: HttpOf
) -> None:
    async with serving(engine_of()) as served:
        body = {"model": "tiny", "messages": [user(clip())]}
        error = (await http_of(served).post("/v1/chat/completions", json=body)).json()["error"]
    assert (error["code"], error["param"]) == ("unsupported_parameter", "messages[0].content[0]")
    assert error["message"] == "Videos are not supported: the model takes text only."
