"""Sounds in chat messages reach schedulers as samples, in their places among the tokens."""

import base64
import hashlib
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx2
import msgspec
import numpy as np
import openai
import pytest
from tokenizers import Tokenizer

pytest.importorskip("soundfile")
pytest.importorskip("soxr")

from packages.frontend.tests.media.audio_files import flac_claiming, saved, voice, wav_claiming
from packages.frontend.tests.media.resending import sent_twice
from packages.frontend.tests.media.seeing import image, seeing, text, user
from tercet.frontend.testing import FakeEngine, Served, serving
from tercet.protocol.messages.audio import SoundFormat
from tercet.protocol.messages.values import ModelLimits, unpack_ints

OpenAIOf = Callable[..., openai.AsyncOpenAI]
HttpOf = Callable[[Served], httpx2.AsyncClient]
CAT, DOG = (saved(voice(seconds, seed=3)) for seconds in (0.5, 0.25))
GOOD = base64.b64encode(CAT).decode()
TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' }}"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}"
    "{% if 'audio' in part %}Audio: <s></s>\n{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
)


def sound(file: bytes, kind: str = "wav") -> dict[str, Any]:
    return {"type": "input_audio", "input_audio": {"data": base64.b64encode(file).decode(), "format": kind}}


@pytest.fixture
def engine(
    engine_of: Callable[..., FakeEngine], files: dict[str, bytes], limits: ModelLimits, tokenizer: Tokenizer
) -> FakeEngine:
    """Return an engine whose model hears a second."""
    form = SoundFormat(
        rate=16_000, hop=160, samples=16_000, marker="</s>", token="</s>", token_id=tokenizer.token_to_id("</s>") or 0
    )
    files = {**files, "chat_template.jinja": TEMPLATE.encode()}
    return engine_of(files=files, limits=msgspec.structs.replace(limits, sounds=form))


@pytest.fixture
async def served(engine: FakeEngine) -> AsyncIterator[Served]:
    async with serving(engine) as running:
        yield running


async def test_sounds_travel_with_their_places(served: Served, engine: FakeEngine, openai_of: OpenAIOf) -> None:
    messages: Any = [
        {"role": "system", "content": "Listen."},
        user(text("a </s> "), sound(CAT), text("and"), sound(DOG)),
        {"role": "assistant", "content": "Both."},
        user(sound(CAT)),
    ]
    client = openai_of(served)
    answer = await client.chat.completions.create(model="tiny", messages=messages, max_tokens=9)
    assert answer.choices[0].message.content == "Hello world!"
    [request], [frames] = engine.requests(), engine.frames
    ids = list(unpack_ints(request.input_ids))
    assert engine.limits.sounds is not None
    placeholder = engine.limits.sounds.token_id
    assert [each.tokens for each in request.sounds] == [12, 6, 12]
    assert ids.count(placeholder) == 30, "what the client writes stays text"
    for each in request.sounds:
        assert ids[each.first : each.first + each.tokens] == [placeholder] * each.tokens
    samples = [(voice(seconds, seed=3)[:, 0] * 32_768).round().astype(np.int16) for seconds in (0.5, 0.25, 0.5)]
    heard = [np.frombuffer(frame, np.int16) for frame in frames]
    assert [len(each) for each in heard] == [8000, 4000, 8000]
    assert all(np.abs(one - other.astype(int)).max() <= 1 for one, other in zip(heard, samples, strict=True))
    assert [each.sha256 for each in request.sounds] == [hashlib.sha256(frame).digest() for frame in frames]
    assert answer.usage is not None
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.audio_tokens == 30
    counted = await client.post("/../tokenize", body={"model": "tiny", "messages": messages}, cast_to=object)
    assert isinstance(counted, dict)
    assert counted["count"] == len(ids) == answer.usage.prompt_tokens


async def test_a_request_is_sent_again_with_its_sounds(served: Served, engine: FakeEngine, http_of: HttpOf) -> None:
    body = {"model": "tiny", "messages": [user(sound(CAT))], "max_tokens": 4}
    first, again = await sent_twice(engine, http_of(served).post("/v1/chat/completions", json=body))
    assert again.sounds == first.sounds


async def test_schedulers_that_hear_nothing_get_no_sounds(served: Served, engine: FakeEngine, http_of: HttpOf) -> None:
    engine.limits = msgspec.structs.replace(engine.limits, sounds=None)
    engine.scheduler_up("scheduler-1")
    for _ in range(4):
        body = {"model": "tiny", "messages": [user(sound(CAT))], "max_tokens": 4}
        assert (await http_of(served).post("/v1/chat/completions", json=body)).status_code == 200
    assert {peer for peer, message in engine.sent if message in engine.requests()} == {"scheduler-0"}


REFUSED = {
    "no audio": (b"no audio", "none of WAV, FLAC, OGG, MP3"),
    "a header that ends early": (CAT[:20], "damaged"),
    "a claim of hours": (flac_claiming(saved(voice(1), kind="FLAC"), 16_000 * 9000), "at most 7200 are read"),
    "more than the model hears": (saved(voice(1.5)), "at most 1 s"),
    "less than a token": (saved(voice(0.015)), "at least 0.020 s"),
    "no samples": (wav_claiming(CAT, 0)[:44], "no samples"),
}


@pytest.mark.parametrize("name", REFUSED)
async def test_a_bad_sound_is_named(served: Served, engine: FakeEngine, http_of: HttpOf, name: str) -> None:
    file, why = REFUSED[name]
    body = {"model": "tiny", "messages": [user(text("hear"), sound(file))]}
    answer = await http_of(served).post("/v1/chat/completions", json=body)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"], error["code"]) == (400, "messages[0].content[1]", "invalid_audio")
    assert why in error["message"]
    assert engine.requests() == []


async def test_text_that_is_no_base64_is_refused(served: Served, http_of: HttpOf) -> None:
    part = {"type": "input_audio", "input_audio": {"data": "no base64!", "format": "wav"}}
    answer = await http_of(served).post("/v1/chat/completions", json={"model": "tiny", "messages": [user(part)]})
    assert answer.status_code == 400
    assert "it is no base64" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([user(*[sound(DOG)] * 33)], "messages"),
        ([user(sound(CAT, "flac"))], "messages[0].content[0].input_audio.format"),
        ([{"role": "system", "content": [sound(CAT)]}], "messages[0].content[0]"),
        ([user(image("data:image/png;base64,AAAA"))], "messages[0].content[0]"),
    ],
)
async def test_other_parts_are_refused_by_name(
    served: Served, http_of: HttpOf, messages: list[Any], param: str
) -> None:
    answer = await http_of(served).post("/v1/chat/completions", json={"model": "tiny", "messages": messages})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


async def transcribed(http: httpx2.AsyncClient, **fields: Any) -> Any:
    data = {"model": "tiny", **fields}
    return await http.post("/v1/audio/transcriptions", data=data, files={"file": ("a.wav", CAT, "audio/wav")})


@pytest.fixture
async def transcribing(engine: FakeEngine) -> AsyncIterator[Served]:
    """Yield a frontend of a model that transcribes sounds."""
    assert engine.limits.sounds is not None
    sounds = msgspec.structs.replace(engine.limits.sounds, transcription="<s>hear </s> {language}<|im_end|>")
    engine.limits = msgspec.structs.replace(engine.limits, sounds=sounds)
    async with serving(engine) as running:
        yield running


async def test_a_sound_is_transcribed(
    transcribing: Served, engine: FakeEngine, http_of: HttpOf, tokenizer: Tokenizer
) -> None:
    http = http_of(transcribing)
    answer = await transcribed(http, language="German", temperature="0.5")
    assert answer.json() == {
        "text": "Hello world!",
        "usage": {
            "type": "tokens",
            "input_tokens": len(unpack_ints(engine.requests()[0].input_ids)),
            "input_token_details": {
                "text_tokens": len(unpack_ints(engine.requests()[0].input_ids)) - 12,
                "audio_tokens": 12,
            },
            "output_tokens": 4,
            "total_tokens": len(unpack_ints(engine.requests()[0].input_ids)) + 4,
        },
    }
    assert (await transcribed(http, response_format="text")).text == "Hello world!\n"
    streamed = await transcribed(http, stream="true")
    events = [msgspec.json.decode(line[6:]) for line in streamed.text.splitlines() if line.startswith("data: ")]
    assert "".join(each["delta"] for each in events[:-1]) == events[-1]["text"] == "Hello world!"
    with_language, without, _ = ([*unpack_ints(each.input_ids)] for each in engine.requests())
    for ids, language in ((with_language, "lang:de"), (without, "")):
        text = f"<s>hear {'</s>' * 12} {language}<|im_end|>"
        assert ids == tokenizer.encode(text, add_special_tokens=False).ids
    assert engine.requests()[0].sampling.temperature == 0.5


@pytest.mark.parametrize(
    ("fields", "param", "why"),
    [
        ({"response_format": "srt"}, "response_format", "json or text"),
        ({"prompt": "hello"}, "prompt", "takes no 'prompt'"),
        ({"language": "elvish"}, "language", "no language"),
    ],
)
async def test_what_a_transcript_of_a_sound_lacks_is_named(
    transcribing: Served, http_of: HttpOf, fields: dict[str, str], param: str, why: str
) -> None:
    answer = await transcribed(http_of(transcribing), **fields)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
    assert why in answer.json()["error"]["message"]


async def test_models_that_hear_transcribe_only_if_they_have_a_form(served: Served, http_of: HttpOf) -> None:
    answer = await transcribed(http_of(served))
    assert answer.status_code == 400
    assert answer.json()["error"]["message"] == "The model 'tiny' takes no audio."


async def test_a_text_has_sounds_in_its_places(served: Served, engine: FakeEngine, http_of: HttpOf) -> None:
    cat, dog = (base64.b64encode(file).decode() for file in (CAT, DOG))
    bodies: list[dict[str, Any]] = [
        {"text": "hear </s> and </s>", "audio_data": [cat, f"data:audio/wav;base64,{dog}"]},
        {"text": "hear </s>", "audio_data": cat},
        {"text": ["</s>", "deaf", "</s></s>"], "audio_data": [cat, None, [cat, dog]]},
    ]
    for body in bodies:
        answer = await http_of(served).post("/generate", json=body)
        assert answer.status_code == 200, answer.text
    found = [[each.tokens for each in request.sounds] for request in engine.requests()]
    assert found == [[12, 6], [12], [12], [], [12, 6]]


@pytest.mark.parametrize(
    ("body", "param", "why"),
    [
        ({"text": "no place", "audio_data": "AAAA"}, "audio_data", "none of WAV"),
        ({"text": "no place", "audio_data": "no base64"}, "audio_data", "no base64"),
        ({"text": "no place", "audio_data": [GOOD]}, "audio_data[0]", "each of its 1 audio clips"),
        ({"input_ids": [1, 2], "audio_data": GOOD}, "audio_data", "'text'"),
        ({"text": ["</s>"], "audio_data": GOOD}, "audio_data", "the audio of each prompt"),
        ({"text": "</s>", "audio_data": GOOD, "image_data": "AAAA"}, "audio_data", "not both"),
    ],
)
async def test_wrong_sounds_of_a_text_are_named(
    served: Served, http_of: HttpOf, body: dict[str, Any], param: str, why: str
) -> None:
    answer = await http_of(served).post("/generate", json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.text
    assert why in answer.json()["error"]["message"]


async def test_models_that_hear_nothing_say_so(
    engine_of: Callable[..., FakeEngine],
    files: dict[str, bytes],
    limits: ModelLimits,
    tokenizer: Tokenizer,
    http_of: HttpOf,
) -> None:
    known = {"text only": engine_of(), "text and images only": seeing(engine_of, files, limits, tokenizer)}
    for reads, engine in known.items():
        async with serving(engine) as served:
            body = {"model": "tiny", "messages": [user(text("hear"), sound(CAT))]}
            answer = await http_of(served).post("/v1/chat/completions", json=body)
        error = answer.json()["error"]
        assert (answer.status_code, error["code"]) == (400, "unsupported_parameter")
        assert error["param"] == "messages[0].content[1]"
        assert f"takes {reads}" in error["message"]
