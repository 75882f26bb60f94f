"""Audio through OpenAI's client: the texts of transformers on the same windows."""

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import transformers
from openai import BadRequestError, OpenAI
from transformers.models.whisper.tokenization_whisper import _combine_tokens_into_words

pytest.importorskip("soundfile")
pytest.importorskip("soxr")

from packages.frontend.tests.media.audio_files import saved, voice
from packages.scheduler.tests.models.audio.checkpoint import write_whisper
from packages.scheduler.tests.models.audio.reference import WhisperReference
from tercet.frontend.media.audio_pipe import ReadAudio
from tercet.frontend.media.audio_worker import audio_windows
from tercet.protocol.messages.audio import Transcript, TranscriptTokens
from tercet.scheduler.models.audio.whisper import audio_model
from tests.server_process import Server

CONTEXT = 40
SECONDS = (5, 29, 95)
FILES = {seconds: saved(voice(seconds, 22_050, 2, seed=seconds), 22_050, "FLAC") for seconds in SECONDS}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_whisper(tmp_path_factory.mktemp("audio") / "hearing", max_target_positions=CONTEXT)


@pytest.fixture(scope="module")
def hearing(start: Callable[..., Server], directory: Path) -> Iterator[Server]:
    server = start(str(directory), "--dtype", "float32", "--kv-cache-bytes", "64MiB").wait()
    yield server
    assert server.stop() == 0, "\n".join(server.lines)


@pytest.fixture(scope="module")
def client(hearing: Server) -> OpenAI:
    return OpenAI(base_url=f"{hearing.url}/v1", api_key="none", max_retries=0)


class Reference(WhisperReference):
    """Transcripts of files, window by window."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.tokens: TranscriptTokens = audio_model(directory).form.tokens
        self.tokenizer: Any = transformers.PreTrainedTokenizerFast(tokenizer_file=str(directory / "tokenizer.json"))
        self._words = SimpleNamespace(
            decode=lambda ids, **_: self.tokenizer.decode(ids, skip_special_tokens=True),
            eos_token_id=audio_model(directory).rules.end,
        )

    def language(self, window: bytes) -> int:
        return self.answer(window, Transcript.LANGUAGE, [self.tokens.start], 1)[0]

    def windows(self, file: bytes) -> list[bytes]:
        order = ReadAudio(file=file, rate=16_000, window=480_000, seconds=9)
        return [each.tobytes() for each in audio_windows(order)]

    def ids(self, file: bytes, *, timed: bool = False, language: str = "", task: str = "transcribe") -> list[list[int]]:
        """Return the answers to all windows, in the language of the first one."""
        windows, tokens = self.windows(file), self.tokens
        spoken = tokens.languages[language] if language else self.language(windows[0])
        prompt = [tokens.start, spoken, getattr(tokens, task), *([] if timed else [tokens.no_timestamps])]
        kind = Transcript.TIMESTAMPS if timed else Transcript.TEXT
        return [self.answer(each, kind, prompt, CONTEXT - len(prompt)) for each in windows]

    def words(self, file: bytes, language: str) -> list[tuple[str, float, float]]:
        """Return the words of all windows with their times, in segments as transformers has them."""
        named = self.tokens
        prompt = [named.start, named.languages[language], named.transcribe or 0]
        found: list[tuple[str, float, float]] = []
        begin = 0.0
        for window in self.windows(file):
            ids, times = self.times(window, Transcript.TIMESTAMPS, prompt, CONTEXT - len(prompt))
            ends = [0.0, *times, times[-1]]
            segment: list[int] = []
            for place, token in enumerate([*ids, named.first_timestamp]):
                if token < named.first_timestamp and place < len(ids):
                    segment.append(place)
                    continue
                own = [ids[each] for each in segment]
                texts, _, indices = _combine_tokens_into_words(self._words, own, "german")
                for text, parts in zip(texts, indices, strict=True):
                    if text.strip():
                        first, last = ends[segment[parts[0]]], ends[segment[parts[-1]] + 1]
                        found.append((text.strip(), begin + first, begin + last))
                segment = []
            begin += len(window) / 2 / 16_000
        return found

    def text(self, file: bytes, **more: Any) -> str:
        said = [self.tokenizer.decode(ids, skip_special_tokens=True) for ids in self.ids(file, **more)]
        return "".join(said).strip()


@pytest.fixture(scope="module")
def reference(directory: Path) -> Reference:
    return Reference(directory)


@pytest.mark.parametrize("seconds", SECONDS)
def test_transcripts_equal_those_of_transformers(client: OpenAI, reference: Reference, seconds: int) -> None:
    file = FILES[seconds]
    answer = client.audio.transcriptions.create(model="hearing", file=("a.flac", file), temperature=0)
    assert answer.text == reference.text(file)
    assert answer.usage is not None
    assert answer.usage.type == "duration"
    assert answer.usage.seconds == pytest.approx(seconds, abs=0.2)
    assert len(answer.text) > 10 * len(reference.windows(file))


@pytest.mark.filterwarnings("ignore:deprecated")  # the client warns of the method
def test_translations_equal_those_of_transformers(client: OpenAI, reference: Reference) -> None:
    answer = client.audio.translations.create(model="hearing", file=("a.flac", FILES[5]), temperature=0)
    assert answer.text == reference.text(FILES[5], task="translate") != reference.text(FILES[5])


def test_a_language_is_named_by_its_code_or_name(client: OpenAI, reference: Reference) -> None:
    for code, name in (("de", "German"), ("fr", "french")):
        for language in (code, name):
            answer = client.audio.transcriptions.create(
                model="hearing", file=("a.flac", FILES[5]), language=language, temperature=0
            )
            assert answer.text == reference.text(FILES[5], language=code)


def test_a_stream_has_the_same_text_in_order(client: OpenAI, reference: Reference) -> None:
    events = list(client.audio.transcriptions.create(model="hearing", file=("a.flac", FILES[95]), stream=True))
    deltas = [each.delta for each in events[:-1] if each.type == "transcript.text.delta"]
    done = events[-1]
    assert done.type == "transcript.text.done"
    assert "".join(deltas).strip() == done.text == reference.text(FILES[95])
    assert len(deltas) == len(events) - 1 > 3


def test_segments_have_times(client: OpenAI, reference: Reference) -> None:
    answer = client.audio.transcriptions.create(
        model="hearing",
        file=("a.flac", FILES[95]),
        response_format="verbose_json",
        temperature=0,
        timestamp_granularities=["segment", "word"],
    )
    windows, answers = reference.windows(FILES[95]), reference.ids(FILES[95], timed=True)
    assert answer.duration == pytest.approx(95, abs=0.01)
    first = reference.tokens.first_timestamp
    assert answer.segments is not None
    told = [token for each in answer.segments for token in each.tokens]
    decode = reference.tokenizer.decode
    blank = {token for token in range(first) if not decode([token], skip_special_tokens=True).strip()}
    said = [token for ids in answers for token in ids if token < first]
    assert [token for token in told if token not in blank] == [token for token in said if token not in blank]
    starts, ends = [each.start for each in answer.segments], [each.end for each in answer.segments]
    assert all(start <= end for start, end in zip(starts, ends, strict=True))
    assert starts == sorted(starts)
    assert starts[-1] > 2 * 28
    assert all(-20 < each.avg_logprob < 0 and each.compression_ratio > 0 for each in answer.segments)
    assert answer.language in {"english", "german", "french"}
    assert len(windows) == 4


def test_words_and_their_times_equal_those_of_transformers(client: OpenAI, reference: Reference) -> None:
    answer = client.audio.transcriptions.create(
        model="hearing",
        file=("a.flac", FILES[95]),
        language="de",
        response_format="verbose_json",
        temperature=0,
        timestamp_granularities=["word"],
    )
    assert answer.words is not None
    told = [(each.word, each.start, each.end) for each in answer.words]
    expected = reference.words(FILES[95], "de")
    assert [each[0] for each in told] == [each[0] for each in expected]
    assert [each[1:] for each in told] == [pytest.approx(each[1:], abs=0.011) for each in expected]
    assert len({each[1] for each in told}) > 4, "the words have different times"


def test_a_guess_is_generated_again_at_higher_temperatures(client: OpenAI) -> None:
    asked: dict[str, Any] = {"model": "hearing", "file": ("a.flac", FILES[5]), "response_format": "verbose_json"}
    answer: Any = client.audio.transcriptions.create(**asked)
    assert {each.temperature for each in answer.segments} == {1.0}, "random weights guess at all temperatures"


@pytest.mark.parametrize("form", ["srt", "vtt"])
def test_subtitles_have_the_text_of_the_segments(hearing: Server, client: OpenAI, form: str) -> None:
    asked: dict[str, Any] = {"model": "hearing", "file": ("a.flac", FILES[5]), "temperature": 0}
    create: Any = client.audio.transcriptions.create
    verbose, text = create(**asked, response_format="verbose_json"), create(**asked, response_format=form)
    arrows = [line for line in str(text).splitlines() if " --> " in line]
    assert len(arrows) == len(verbose.segments)
    assert str(text).startswith("WEBVTT\n\n00:00:" if form == "vtt" else "1\n00:00:")
    for segment in verbose.segments:
        assert " ".join(segment.text.split()).replace("-->", "->") in str(text)


def test_the_text_before_the_audio_is_a_prompt(client: OpenAI, reference: Reference) -> None:
    asked: dict[str, Any] = {"model": "hearing", "file": ("a.flac", FILES[5]), "language": "en", "temperature": 0}
    answer = client.audio.transcriptions.create(**asked, prompt="Tercet <|endoftext|>")
    before = reference.tokenizer.backend_tokenizer.encode(" Tercet ", add_special_tokens=False).ids
    before += [ord(letter) - 33 for letter in "<|endoftext|>"]
    tokens = reference.tokens
    assert tokens.previous is not None
    assert tokens.transcribe is not None
    named = [tokens.start, tokens.languages["en"], tokens.transcribe, tokens.no_timestamps]
    prompt = [tokens.previous, *before[-(CONTEXT // 2 - 1) :], *named]
    [window] = reference.windows(FILES[5])
    ids = reference.answer(window, Transcript.TEXT, prompt, CONTEXT - len(prompt))
    assert answer.text == reference.tokenizer.decode(ids, skip_special_tokens=True).strip()


def test_requests_without_audio_are_refused_by_a_sentence(client: OpenAI, hearing: Server) -> None:
    sentence = "turns audio into text, and answers /v1/audio/transcriptions only"
    messages: Any = [{"role": "user", "content": "hello"}]
    with pytest.raises(BadRequestError, match=sentence):
        client.chat.completions.create(model="hearing", messages=messages)
    with pytest.raises(BadRequestError, match=sentence):
        client.completions.create(model="hearing", prompt="hello")
    with pytest.raises(BadRequestError, match=sentence):
        client.responses.create(model="hearing", input="hello")
    for path, body in (
        ("/generate", {"text": "hello"}),
        ("/v1/messages", {"model": "hearing", "max_tokens": 4, "messages": messages}),
    ):
        answer = httpx.post(hearing.url + path, json=body)
        assert answer.status_code == 400
        assert sentence in answer.text
    with pytest.raises(BadRequestError, match="generates text"):
        client.embeddings.create(model="hearing", input="hello")
