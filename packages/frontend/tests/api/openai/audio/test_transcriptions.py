"""Audio in forms reaches schedulers as samples, and transcripts come back in all formats."""

import hashlib
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx2
import msgspec
import numpy as np
import openai
import pytest
from openai.types.audio.transcription_create_params import TranscriptionCreateParamsNonStreaming
from openai.types.audio.translation_create_params import TranslationCreateParams

pytest.importorskip("soundfile")
pytest.importorskip("soxr")

from packages.frontend.tests.media.audio_files import saved, voice
from packages.frontend.tests.media.hearing import FORM, TOKENS, hearing
from packages.frontend.tests.media.resending import sent_twice
from tercet.frontend.api.docs.operations import OPERATIONS
from tercet.frontend.api.openai.audio import routes
from tercet.frontend.api.openai.audio.schema import TranscriptionRequest, TranslationRequest
from tercet.frontend.config.config import HttpConfig
from tercet.frontend.testing import FakeEngine, Served, serving
from tercet.frontend.testing.engine import Token
from tercet.protocol.messages.audio import Transcript
from tercet.protocol.messages.messages import TokenizedGenerateReqInput
from tercet.protocol.messages.values import FinishReason, FinishType, ModelLimits, unpack_ints

OpenAIOf = Callable[..., openai.AsyncOpenAI]
HttpOf = Callable[[Served], httpx2.AsyncClient]
SECOND, LONG = saved(voice(1)), saved(voice(9))
TRANSCRIPTIONS, TRANSLATIONS = "/v1/audio/transcriptions", "/v1/audio/translations"
STOP = FinishReason(FinishType.STOP)


@pytest.fixture
def engine(engine_of: Callable[..., FakeEngine], limits: ModelLimits) -> FakeEngine:
    return hearing(engine_of, limits)


@pytest.fixture
async def served(engine: FakeEngine) -> AsyncIterator[Served]:
    async with serving(engine) as running:
        yield running


async def post(http: httpx2.AsyncClient, file: bytes = SECOND, path: str = TRANSCRIPTIONS, **fields: Any) -> Any:
    data = {"model": "tiny", "language": "en", **fields}
    data = {name: value for name, value in data.items() if value is not None}
    return await http.post(path, data=data, files={"file": ("a.wav", file, "audio/wav")})


def prompts(engine: FakeEngine) -> list[list[int]]:
    return [list(unpack_ints(request.input_ids)) for request in engine.requests()]


async def test_windows_travel_as_samples(served: Served, engine: FakeEngine, openai_of: OpenAIOf) -> None:
    client = openai_of(served)
    answer = await client.audio.transcriptions.create(
        model="tiny", file=("a.wav", LONG), language="de", temperature=0.2
    )
    assert answer.text == "Hello world!Hello world!Hello world!"
    requests = engine.requests()
    frames = [bytes(frame) for [frame] in engine.frames]
    samples = np.frombuffer(b"".join(frames), "<i2")
    assert len(samples) == 144_000
    assert np.abs(samples / 32_768 - voice(9)[:, 0]).max() < 1e-3
    assert len(requests) == 3
    assert prompts(engine) == [[TOKENS.start, 7, TOKENS.transcribe, TOKENS.no_timestamps]] * 3
    assert [each.audio and each.audio.sha256 for each in requests] == [
        hashlib.sha256(frame).digest() for frame in frames
    ]
    assert {each.sampling.temperature for each in requests} == {0.2}
    assert answer.usage is not None
    assert answer.usage.model_dump() == {"type": "duration", "seconds": 9.0}


@pytest.mark.parametrize(("found", "status"), [(7, 200), (99, 500)])
async def test_the_language_is_detected_first(
    engine_of: Callable[..., FakeEngine], limits: ModelLimits, http_of: HttpOf, found: int, status: int
) -> None:
    def script(request: TokenizedGenerateReqInput, _: int) -> list[Token]:
        detects = request.audio is not None and request.audio.transcript is Transcript.LANGUAGE
        return [Token(found, "", STOP)] if detects else [Token(9, " Hello", STOP)]

    engine = engine_of(script=script, limits=msgspec.structs.replace(limits, audio=FORM))
    async with serving(engine) as served:
        answer = await post(http_of(served), path=TRANSLATIONS, language=None)
    assert answer.status_code == status
    assert prompts(engine)[0] == [TOKENS.start]
    assert engine.requests()[0].sampling.max_new_tokens == 1
    assert prompts(engine)[1:] == ([[TOKENS.start, 7, TOKENS.translate, TOKENS.no_timestamps]] if status == 200 else [])
    if status == 200:
        assert answer.json().keys() == OPERATIONS["POST", TRANSLATIONS].response.keys()
        assert answer.json()["text"] == "Hello"


async def test_the_text_before_the_audio_is_text(served: Served, engine: FakeEngine, http_of: HttpOf) -> None:
    answer = await post(http_of(served), prompt="hello <|endoftext|> </s>")
    assert answer.status_code == 200, answer.text
    [ids] = prompts(engine)
    assert ids[0] == TOKENS.previous
    assert ids[-4:] == [TOKENS.start, 6, TOKENS.transcribe, TOKENS.no_timestamps]
    assert len(ids) > 10, "what the client writes stays text"


async def test_a_request_is_sent_again_with_its_audio(served: Served, engine: FakeEngine, http_of: HttpOf) -> None:
    first, again = await sent_twice(engine, post(http_of(served)))
    assert again.audio == first.audio


async def test_schedulers_that_take_no_audio_get_none(served: Served, engine: FakeEngine, http_of: HttpOf) -> None:
    engine.limits = msgspec.structs.replace(engine.limits, audio=None)
    engine.scheduler_up("scheduler-1")
    for _ in range(4):
        assert (await post(http_of(served))).status_code == 200
    assert {peer for peer, message in engine.sent if message in engine.requests()} == {"scheduler-0"}


def timed(request: TokenizedGenerateReqInput, _: int) -> list[Token]:
    """Return two segments, of which the second has no end."""
    begin = TOKENS.first_timestamp
    ids = [begin + 5, 10, 11, begin + 20, begin + 25, 12]
    return [*(Token(each, f"<{each}>", logprob=-0.25) for each in ids), Token(0, "", STOP, logprob=-9.0)]


@pytest.fixture
async def segmented(engine_of: Callable[..., FakeEngine], limits: ModelLimits) -> AsyncIterator[Served]:
    limits = msgspec.structs.replace(limits, audio=FORM, eos_token_ids=[0])
    async with serving(engine_of(script=timed, limits=limits)) as running:
        yield running


async def test_segments_have_their_times_in_the_file(segmented: Served, http_of: HttpOf) -> None:
    answer = (await post(http_of(segmented), LONG, response_format="verbose_json")).json()
    assert (answer["task"], answer["language"], answer["duration"]) == ("transcribe", "english", 9.0)
    cuts = answer["segments"][2]["seek"] / 100, answer["segments"][4]["seek"] / 100
    expected = []
    for first, last in ((0.0, cuts[0]), (cuts[0], cuts[1]), (cuts[1], 9.0)):
        expected += [(first + 0.1, first + 0.4, [10, 11]), (first + 0.5, last, [12])]
    told = [(each["start"], each["end"], each["tokens"]) for each in answer["segments"]]
    for one, other in zip(told, expected, strict=True):
        assert one[:2] == pytest.approx(other[:2], abs=0.011)
        assert one[2] == other[2]
    assert {each["avg_logprob"] for each in answer["segments"]} == {-0.25}
    assert answer["usage"] == {"type": "duration", "seconds": 9.0}


async def test_subtitles_are_numbered_and_timed(segmented: Served, http_of: HttpOf) -> None:
    srt = await post(http_of(segmented), response_format="srt")
    vtt = await post(http_of(segmented), response_format="vtt")
    assert srt.headers["content-type"].startswith("application/x-subrip")
    assert vtt.headers["content-type"].startswith("text/vtt")
    assert srt.text.startswith("1\n00:00:00,100 --> 00:00:00,400\n")
    assert "\n\n2\n00:00:00,500 --> 00:00:01,000\n" in srt.text
    assert vtt.text.startswith("WEBVTT\n\n00:00:00.100 --> 00:00:00.400\n")


async def test_text_is_plain(served: Served, http_of: HttpOf) -> None:
    answer = await post(http_of(served), response_format="text")
    assert answer.text == "Hello world!\n"
    assert answer.headers["content-type"].startswith("text/plain")


async def test_a_stream_has_deltas_and_the_whole(served: Served, http_of: HttpOf) -> None:
    answer = await post(http_of(served), LONG, stream="true")
    events = [msgspec.json.decode(line[6:]) for line in answer.text.splitlines() if line.startswith("data: ")]
    deltas = [each["delta"] for each in events if each["type"] == "transcript.text.delta"]
    assert "".join(deltas) == events[-1]["text"] == "Hello world!" * 3
    assert events[-1]["type"] == "transcript.text.done"
    assert events[-1]["usage"] == {"type": "duration", "seconds": 9.0}


@pytest.mark.parametrize(
    ("fields", "param", "text"),
    [
        ({"timestamp_granularities[]": "word"}, "timestamp_granularities", "verbose_json only"),
        ({"timestamp_granularities[]": "segment"}, "timestamp_granularities", "verbose_json only"),
        ({"stream": "true", "response_format": "srt"}, "stream", "json or text"),
        ({"response_format": "mp3"}, "response_format", "Input should be"),
        ({"temperature": "1.5"}, "temperature", "less than or equal to 1"),
        ({"temperature": "nan"}, "temperature", "finite"),
        ({"language": "xx"}, "language", "none of this model's languages: de, en"),
        ({"include[]": "logprobs"}, "include", "not supported"),
        ({"chunking_strategy": "server_vad"}, "chunking_strategy", "not supported"),
        ({"known_speaker_names[]": "me"}, "known_speaker_names", "not supported"),
        ({"made_up": "1"}, "made_up", "Unknown parameter"),
        ({"model": "other"}, "model", "does not exist"),
        ({"model": None}, "model", "Missing required parameter"),
    ],
)
async def test_wrong_fields_are_named(served: Served, http_of: HttpOf, fields: Any, param: str, text: str) -> None:
    answer = await post(http_of(served), **fields)
    assert answer.status_code in (400, 404)
    error = answer.json()["error"]
    assert error["param"] == param
    assert text in error["message"]


async def test_harmless_fields_are_accepted(served: Served, http_of: HttpOf) -> None:
    fields: dict[str, Any] = {"chunking_strategy": "auto", "stream": "false", "timestamp_granularities[]": "segment"}
    answer = await post(http_of(served), **fields, response_format="verbose_json")
    assert answer.status_code == 200, answer.text


async def test_bodies_that_are_no_such_form_are_refused(served: Served, http_of: HttpOf) -> None:
    http, head = http_of(served), {"content-type": "multipart/form-data; boundary=x"}
    asked = {
        "json": http.post(TRANSCRIPTIONS, json={"model": "tiny"}),
        "no boundary": http.post(TRANSCRIPTIONS, content=b"a", headers={"content-type": "multipart/form-data"}),
        "no form": http.post(TRANSCRIPTIONS, content=b"nothing", headers=head),
        "no name": http.post(
            TRANSCRIPTIONS, content=b"--x\r\nContent-Disposition: form-data\r\n\r\na\r\n--x--\r\n", headers=head
        ),
        "two files": http.post(TRANSCRIPTIONS, files=[("file", ("a", b"a")), ("file", ("b", b"b"))]),
        "no file": http.post(TRANSCRIPTIONS, files={"model": (None, "tiny")}),
        "many fields": http.post(TRANSCRIPTIONS, files={f"f{number}": (None, "a") for number in range(70)}),
        "a long field": http.post(TRANSCRIPTIONS, files={"model": (None, "a" * 70_000)}),
        "a field twice": http.post(TRANSCRIPTIONS, files=[("model", (None, "a")), ("model", (None, "b"))]),
        "no audio": post(http, b"no audio"),
    }
    answers = {name: await each for name, each in asked.items()}
    assert {name: answer.status_code for name, answer in answers.items()} == {
        name: 415 if name == "json" else 400 for name in asked
    }
    assert "none of WAV" in answers["no audio"].text
    assert answers["no file"].json()["error"]["param"] == "file"


async def test_long_files_are_refused(served: Served, http_of: HttpOf, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routes, "MAX_FILE_BYTES", len(SECOND) - 1)
    assert (await post(http_of(served))).status_code == 413


async def test_long_bodies_are_refused(engine: FakeEngine, http_of: HttpOf) -> None:
    async def pieces() -> AsyncIterator[bytes]:
        for _ in range(9):
            yield bytes(1000)

    head = {"content-type": "multipart/form-data; boundary=x"}
    async with serving(engine, HttpConfig(max_body_bytes=4096)) as served:
        assert (await post(http_of(served))).status_code == 413
        answer = await http_of(served).post(TRANSCRIPTIONS, content=pieces(), headers=head)
        assert answer.status_code in (400, 413)


async def test_a_model_of_one_language_translates_none(
    engine_of: Callable[..., FakeEngine], limits: ModelLimits, http_of: HttpOf
) -> None:
    tokens = msgspec.structs.replace(TOKENS, languages={}, transcribe=None, translate=None, previous=None)
    engine = hearing(engine_of, limits, msgspec.structs.replace(FORM, tokens=tokens))
    async with serving(engine) as served:
        http = http_of(served)
        assert (await post(http, language=None)).status_code == 200
        assert prompts(engine) == [[TOKENS.start, TOKENS.no_timestamps]]
        refused = [
            await post(http, path=TRANSLATIONS, language=None),
            await post(http, language="de"),
            await post(http, prompt="hello"),
        ]
    assert [answer.json()["error"]["param"] for answer in refused] == ["model", "language", "prompt"]


async def test_a_model_of_text_takes_no_audio(engine_of: Callable[..., FakeEngine], http_of: HttpOf) -> None:
    async with serving(engine_of()) as served:
        answer = await post(http_of(served))
    assert answer.status_code == 400
    assert answer.json()["error"]["message"] == "The model 'tiny' takes no audio."


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"model": "tiny", "messages": [{"role": "user", "content": "hello"}]}),
        ("/v1/completions", {"model": "tiny", "prompt": "hello"}),
        ("/v1/completions", {"model": "tiny", "prompt": [5, 6]}),
        ("/v1/responses", {"model": "tiny", "input": "hello"}),
        ("/v1/messages", {"model": "tiny", "max_tokens": 4, "messages": [{"role": "user", "content": "hello"}]}),
        ("/generate", {"text": "hello"}),
    ],
)
async def test_a_model_of_audio_answers_nothing_else(served: Served, http_of: HttpOf, path: str, body: Any) -> None:
    answer = await http_of(served).post(path, json=body)
    assert answer.status_code == 400
    assert "turns audio into text, and answers /v1/audio/transcriptions only" in answer.text


def test_every_documented_field_is_known() -> None:
    for params, schema in (
        (TranscriptionCreateParamsNonStreaming, TranscriptionRequest),
        (TranslationCreateParams, TranslationRequest),
    ):
        assert params.__annotations__.keys() <= schema.model_fields.keys()


async def test_the_model_s_information_says_that_it_hears(served: Served, http_of: HttpOf) -> None:
    told = (await http_of(served).get("/model_info")).json()
    assert (told["has_audio_understanding"], told["has_image_understanding"]) == (True, False)
