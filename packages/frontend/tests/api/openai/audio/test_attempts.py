"""Windows whose text fails are generated again at higher temperatures; times of words come from a second pass."""

from collections.abc import Callable
from typing import Any

import httpx2
import msgspec
import pytest

pytest.importorskip("soundfile")
pytest.importorskip("soxr")

from packages.frontend.tests.api.openai.audio.test_transcriptions import LONG, post, prompts, timed
from packages.frontend.tests.media.hearing import FORM, TOKENS
from tercet.frontend.testing import FakeEngine, Served, serving
from tercet.frontend.testing.engine import Token
from tercet.protocol.messages.audio import Transcript
from tercet.protocol.messages.messages import TokenizedGenerateReqInput
from tercet.protocol.messages.values import FinishReason, FinishType, ModelLimits

EngineOf = Callable[..., FakeEngine]
HttpOf = Callable[[Served], httpx2.AsyncClient]
Script = Callable[[TokenizedGenerateReqInput, int], list[Token]]
NO_SPEECH = 8
STOP = FinishReason(FinishType.STOP)


def made(engine_of: EngineOf, limits: ModelLimits, script: Script, **form: Any) -> FakeEngine:
    tokens = msgspec.structs.replace(TOKENS, no_speech=NO_SPEECH)
    audio = msgspec.structs.replace(FORM, tokens=tokens, **form)
    return engine_of(script=script, limits=msgspec.structs.replace(limits, audio=audio, eos_token_ids=[0]))


def said(text: str, logprob: float, tokens: int = 4) -> list[Token]:
    end = Token(0, "", STOP, logprob=logprob)
    return [Token(10, text, logprob=logprob), *[Token(10, "", logprob=logprob)] * (tokens - 1), end]


def kinds(engine: FakeEngine) -> list[tuple[str, float]]:
    return [(each.audio.transcript, each.sampling.temperature) for each in engine.requests() if each.audio is not None]


@pytest.mark.parametrize(
    ("sound_at", "tried"),
    [(0.0, [0.0]), (0.4, [0.0, 0.2, 0.4]), (2.0, [0.0, 0.2, 0.4, 0.6, 0.8, 1.0])],
)
async def test_a_guess_is_tried_again(
    engine_of: EngineOf, limits: ModelLimits, http_of: HttpOf, sound_at: float, tried: list[float]
) -> None:
    def script(request: TokenizedGenerateReqInput, _: int) -> list[Token]:
        if request.audio is not None and request.audio.transcript is Transcript.SPEECH:
            return [Token(NO_SPEECH, "", STOP, logprob=-0.9)]
        temperature = request.sampling.temperature
        return said(f" at {temperature}", -0.5 if temperature >= sound_at else -1.5)

    engine = made(engine_of, limits, script)
    async with serving(engine) as served:
        answer = await post(http_of(served))
    assert answer.json()["text"] == f"at {tried[-1]}"
    texts = [temperature for kind, temperature in kinds(engine) if kind is Transcript.TEXT]
    assert texts == tried


async def test_a_text_that_repeats_itself_is_tried_again(
    engine_of: EngineOf, limits: ModelLimits, http_of: HttpOf
) -> None:
    def script(request: TokenizedGenerateReqInput, _: int) -> list[Token]:
        return said("text", -0.1, tokens=60 if request.sampling.temperature < 0.2 else 2)

    engine = made(engine_of, limits, script)
    async with serving(engine) as served:
        answer = await post(http_of(served), response_format="verbose_json")
    [segment] = answer.json()["segments"]
    assert (len(segment["tokens"]), segment["temperature"]) == (2, 0.2)
    assert [temperature for _, temperature in kinds(engine)] == [0.0, 0.2]


async def test_only_failed_windows_are_tried_again(engine_of: EngineOf, limits: ModelLimits, http_of: HttpOf) -> None:
    hashes: list[bytes] = []

    def script(request: TokenizedGenerateReqInput, _: int) -> list[Token]:
        assert request.audio is not None
        if request.audio.sha256 not in hashes:
            hashes.append(request.audio.sha256)
        number, temperature = hashes.index(request.audio.sha256), request.sampling.temperature
        return said(f" {number}", -2.0 if number == 1 and temperature < 0.3 else -0.2)

    engine = made(engine_of, limits, script)
    async with serving(engine) as served:
        answer = await post(http_of(served), LONG)
    assert sorted(answer.json()["text"].split()) == ["0", "1", "2"]
    assert [temperature for kind, temperature in kinds(engine) if kind is Transcript.TEXT] == [0.0] * 3 + [0.2, 0.4]


@pytest.mark.parametrize("probable", [True, False])
async def test_a_guess_without_speech_has_no_text(
    engine_of: EngineOf, limits: ModelLimits, http_of: HttpOf, probable: bool
) -> None:
    def script(request: TokenizedGenerateReqInput, _: int) -> list[Token]:
        if request.audio is not None and request.audio.transcript is Transcript.SPEECH:
            return [Token(NO_SPEECH, "", STOP, logprob=-0.4 if probable else -0.6)]
        return said(" Thanks for watching", -1.5)

    engine = made(engine_of, limits, script)
    async with serving(engine) as served:
        answer = await post(http_of(served), prompt="hello")
    assert answer.json()["text"] == ("" if probable else "Thanks for watching")
    [asked] = [ids for ids, (kind, _) in zip(prompts(engine), kinds(engine), strict=True) if kind is Transcript.SPEECH]
    assert (asked[0], asked[-1]) == (TOKENS.previous, TOKENS.start)
    assert len(kinds(engine)) == (2 if probable else 7)


@pytest.mark.parametrize("fields", [{"temperature": "0"}, {"temperature": "0.7"}, {"stream": "true"}])
async def test_a_given_temperature_and_a_stream_are_tried_once(
    engine_of: EngineOf, limits: ModelLimits, http_of: HttpOf, fields: dict[str, Any]
) -> None:
    engine = made(engine_of, limits, lambda *_: said(" guess", -1.5))
    async with serving(engine) as served:
        answer = await post(http_of(served), **fields)
    assert "guess" in answer.text
    assert kinds(engine) == [(Transcript.TEXT, float(fields.get("temperature", 0)))]


def timed_words(request: TokenizedGenerateReqInput, index: int) -> list[Token]:
    times = request.audio is not None and request.audio.transcript is Transcript.TIMES
    return [Token(9, "", STOP)] if times else timed(request, index)


@pytest.mark.parametrize("more", [["word"], ["word", "segment"]])
async def test_words_have_their_times_in_the_file(
    engine_of: EngineOf, limits: ModelLimits, http_of: HttpOf, more: list[str]
) -> None:
    engine = made(engine_of, limits, timed_words, token_times=True)
    fields: dict[str, Any] = {"response_format": "verbose_json", "timestamp_granularities[]": more, "temperature": "0"}
    async with serving(engine) as served:
        answer = (await post(http_of(served), LONG, **fields)).json()
    assert ("segments" in answer) == ("segment" in more)
    asked = [ids for ids, (kind, _) in zip(prompts(engine), kinds(engine), strict=True) if kind is Transcript.TIMES]
    begin = TOKENS.first_timestamp
    named = [TOKENS.start, 6, TOKENS.transcribe]
    assert asked == [[*named, begin + 5, 10, 11, begin + 20, begin + 25, 12]] * 3
    window = (answer["words"][-1]["end"] - 0.6, 9.0)
    assert window[0] > 4.0, "the third window"
    assert [each["end"] for each in answer["words"]] == sorted(each["end"] for each in answer["words"])
    for word in answer["words"]:
        assert word["start"] <= word["end"]
        assert word.keys() == {"word", "start", "end"}
    assert (answer["words"][0]["start"], answer["words"][0]["word"]) == (0.1, answer["words"][0]["word"].strip())


async def test_models_without_times_of_words_say_so(engine_of: EngineOf, limits: ModelLimits, http_of: HttpOf) -> None:
    fields: dict[str, Any] = {"response_format": "verbose_json", "timestamp_granularities[]": "word"}
    async with serving(made(engine_of, limits, timed_words)) as served:
        answer = await post(http_of(served), **fields)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, "timestamp_granularities")
    assert "no alignment_heads" in error["message"]
