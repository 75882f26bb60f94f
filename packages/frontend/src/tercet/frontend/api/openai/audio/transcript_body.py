"""Bodies of responses with transcripts, in all formats."""

import zlib
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import msgspec
import orjson

from tercet.frontend.api.generation_response import FinishedChoice
from tercet.frontend.api.openai.audio.languages import name_of
from tercet.frontend.api.openai.audio.schema import Format
from tercet.frontend.api.openai.audio.segments import Segment, segments_of, srt, vtt
from tercet.frontend.api.openai.audio.words import WITHOUT_SPACES, words_of
from tercet.frontend.http.loop_turns import Steps
from tercet.frontend.model.served_model import ServedModel
from tercet.protocol.messages.audio import AudioFormat
from tercet.protocol.messages.values import unpack_floats

_FRAMES = 100
"""Frames of log-mel features in a second, in which OpenAI counts `seek`."""


class Transcript(msgspec.Struct, frozen=True, kw_only=True):
    """Properties of a transcript that are known before its text."""

    task: str
    format: Format
    granularities: frozenset[str]
    """Parts of `verbose_json` that have times: `segment`, `word`."""
    language: str
    """Code of the language; empty for a model of one language."""
    ends: list[float]
    """End of each window in seconds."""

    @property
    def seconds(self) -> float:
        return self.ends[-1]

    @property
    def usage(self) -> dict[str, Any]:
        return {"type": "duration", "seconds": round(self.seconds, 2)}


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """Text of a window, and the temperature at which it was generated."""

    choice: FinishedChoice
    temperature: float
    silent: bool = False
    """The window has no speech, and its text does not count."""
    times: Sequence[float] = ()
    """Second in the window at which each token ends, if times of words are wanted."""

    @property
    def text(self) -> str:
        return "" if self.silent else self.choice.text

    @property
    def token_ids(self) -> Sequence[int]:
        return [] if self.silent else self.choice.token_ids

    @property
    def logprobs(self) -> list[float]:
        """Return the log-probability of each token; empty if they were not wanted."""
        return [] if self.silent else [each for part in self.choice.logprobs for each in unpack_floats(part.chosen)]


class _Told(NamedTuple):
    """Segment with its text, its window, and the second at which the window begins."""

    segment: Segment
    text: str
    outcome: Outcome
    window: float


class TranscriptBody:
    """Body of one response."""

    def __init__(self, model: ServedModel, form: AudioFormat, transcript: Transcript) -> None:
        self._model = model
        self._form = form
        self._transcript = transcript

    def written(self, outcomes: Sequence[Outcome]) -> Steps[bytes]:
        """Return the body in the request's format, for the outcome of each window."""
        form = self._transcript.format
        if form in {"json", "text"}:
            text = "".join(each.text for each in outcomes).strip()
            usage = self._transcript.usage
            return text.encode() + b"\n" if form == "text" else orjson.dumps({"text": text, "usage": usage})
        told: list[_Told] = []
        for outcome, (first, last) in zip(outcomes, pairwise([0.0, *self._transcript.ends]), strict=True):
            ids, tokens = outcome.token_ids, self._form.tokens
            scores = outcome.logprobs or [0.0] * len(ids)
            for segment in segments_of(ids, scores, tokens, self._end_id(ids), first, last):
                text = self._decoded(segment.token_ids)
                if text.strip():
                    told.append(_Told(segment, text, outcome, first))
            yield
        if form == "verbose_json":
            return orjson.dumps((yield from self._verbose(told)))
        return (srt if form == "srt" else vtt)([(each.segment, each.text) for each in told]).encode()

    def _decoded(self, ids: list[int]) -> str:
        return self._model.tokenizer.decode(ids, skip_special_tokens=True)

    def _end_id(self, ids: Sequence[int]) -> int:
        """Return the token that ended a window, if one did."""
        return ids[-1] if ids and ids[-1] in self._model.limits.eos_token_ids else -1

    def _verbose(self, told: Sequence[_Told]) -> Steps[dict[str, Any]]:
        transcript = self._transcript
        body: dict[str, Any] = {
            "task": transcript.task,
            "language": name_of(transcript.language or "en"),
            "duration": transcript.seconds,
            "text": "".join(each.text for each in told).strip(),
        }
        if "segment" in transcript.granularities:
            body["segments"] = [self._segment(number, each) for number, each in enumerate(told)]
        if "word" in transcript.granularities:
            body["words"] = []
            for each in told:
                body["words"] += self._words(each)
                yield
        return {**body, "usage": transcript.usage}

    @staticmethod
    def _segment(number: int, told: _Told) -> dict[str, Any]:
        segment = told.segment
        return {
            "id": number,
            "seek": round(min(told.window, segment.start) * _FRAMES),
            "start": round(segment.start, 2),
            "end": round(segment.end, 2),
            "text": told.text,
            "tokens": segment.token_ids,
            "temperature": told.outcome.temperature,
            "avg_logprob": segment.logprob,
            "compression_ratio": compression_ratio(told.text),
            "no_speech_prob": None,
        }

    def _words(self, told: _Told) -> list[dict[str, Any]]:
        """Return the words of a segment that have a text. A word begins where the token before it ends."""
        spaced = self._transcript.language not in WITHOUT_SPACES
        ends = [0.0, *told.outcome.times]
        found = []
        for word in words_of(told.segment.token_ids, self._decoded, spaced=spaced):
            first, last = (told.window + ends[told.segment.place + place] for place in (word.first, word.last))
            if word.text.strip():
                found.append({"word": word.text.strip(), "start": round(first, 2), "end": round(last, 2)})
        return found


def compression_ratio(text: str) -> float:
    """Return the bytes of a text for each byte of the compressed text: high if it repeats itself."""
    content = text.encode()
    return len(content) / len(zlib.compress(content))
