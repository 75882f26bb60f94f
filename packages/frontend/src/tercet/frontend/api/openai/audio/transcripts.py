"""Responses with transcripts, in all formats and as a stream."""

import zlib
from collections.abc import Sequence
from typing import Any

import msgspec
import orjson

from tercet.frontend.api.generation_response import FinishedChoice
from tercet.frontend.api.openai.audio.languages import name_of
from tercet.frontend.api.openai.audio.schema import Format
from tercet.frontend.api.openai.audio.segments import Segment, segments_of, srt, vtt
from tercet.frontend.http.loop_turns import Steps
from tercet.frontend.http.sse import event
from tercet.frontend.manager.req_state import Generation, GenerationUpdate, ReqState
from tercet.frontend.model.served_model import ServedModel
from tercet.protocol.messages.audio import AudioFormat
from tercet.protocol.messages.values import unpack_floats

_FRAMES = 100
"""Frames of log-mel features in a second, in which OpenAI counts `seek`."""
MEDIA_TYPES: dict[Format, str] = {
    "json": "application/json",
    "text": "text/plain; charset=utf-8",
    "srt": "application/x-subrip; charset=utf-8",
    "verbose_json": "application/json",
    "vtt": "text/vtt; charset=utf-8",
}


class Transcript(msgspec.Struct, frozen=True, kw_only=True):
    """Properties of a transcript that are known before its text."""

    task: str
    format: Format
    language: str
    """Code of the language; empty for a model of one language."""
    temperature: float
    ends: list[float]
    """End of each window in seconds."""

    @property
    def seconds(self) -> float:
        return self.ends[-1]


class TranscriptWriter:
    """Writer of transcripts, whose windows are the prompts of a generation. They may end in any order."""

    def __init__(self, model: ServedModel, form: AudioFormat, transcript: Transcript) -> None:
        self._model = model
        self._form = form
        self._transcript = transcript
        self._texts = ["" for _ in transcript.ends]
        self._ended = [False for _ in transcript.ends]
        self._window = 0
        """Window whose text is streamed."""
        self._sent = ""

    def prepare(self, state: ReqState) -> Steps[None]:  # noqa: ARG002
        """Do nothing: events are short."""
        yield from ()

    def events(self, generation: Generation, arrivals: list[GenerationUpdate]) -> bytes:  # noqa: ARG002
        """Return an event with the new text, in the order of windows."""
        for arrival in arrivals:
            self._texts[arrival.prompt] += arrival.update.text
            self._ended[arrival.prompt] = arrival.update.finish is not None
        new = ""
        while self._window < len(self._texts):
            new += self._texts[self._window]
            self._texts[self._window] = ""
            if not self._ended[self._window]:
                break
            self._window += 1
        if not self._sent:
            new = new.lstrip()
        self._sent += new
        return event(orjson.dumps({"type": "transcript.text.delta", "delta": new})) if new else b""

    def end(self, generation: Generation) -> bytes:  # noqa: ARG002
        """Return the event with the whole text."""
        done = {"type": "transcript.text.done", "text": self._sent.rstrip(), "usage": self._usage()}
        return event(orjson.dumps(done))

    def full_response(self, generation: Generation, choices: list[FinishedChoice]) -> Steps[bytes]:  # noqa: ARG002
        """Return the body in the request's format."""
        form = self._transcript.format
        if form in {"json", "text"}:
            text = "".join(each.text for each in choices).strip()
            return text.encode() + b"\n" if form == "text" else orjson.dumps({"text": text, "usage": self._usage()})
        texts: list[tuple[Segment, str]] = []
        firsts = [0.0, *self._transcript.ends]
        for choice, first, last in zip(choices, firsts, self._transcript.ends, strict=False):
            scores = [score for part in choice.logprobs for score in unpack_floats(part.chosen)]
            ids = choice.token_ids
            tokens, end = self._form.tokens, self._end_id(ids)
            for segment in segments_of(ids, scores or [0.0] * len(ids), tokens, end, first, last):
                text = self._model.tokenizer.decode(segment.token_ids, skip_special_tokens=True)
                if text.strip():
                    texts.append((segment, text))
            yield
        if form == "verbose_json":
            return orjson.dumps(self._verbose(texts))
        return (srt if form == "srt" else vtt)(texts).encode()

    def _end_id(self, ids: Sequence[int]) -> int:
        """Return the token that ended a window, if one did."""
        return ids[-1] if ids and ids[-1] in self._model.limits.eos_token_ids else -1

    def _verbose(self, texts: Sequence[tuple[Segment, str]]) -> dict[str, Any]:
        transcript = self._transcript
        return {
            "task": transcript.task,
            "language": name_of(transcript.language or "en"),
            "duration": transcript.seconds,
            "text": "".join(text for _, text in texts).strip(),
            "segments": [self._segment(number, *each) for number, each in enumerate(texts)],
            "usage": self._usage(),
        }

    def _segment(self, number: int, segment: Segment, text: str) -> dict[str, Any]:
        content = text.encode()
        window = next(first for first in reversed([0.0, *self._transcript.ends]) if first <= segment.start)
        return {
            "id": number,
            "seek": round(min(window, segment.start) * _FRAMES),
            "start": round(segment.start, 2),
            "end": round(segment.end, 2),
            "text": text,
            "tokens": segment.token_ids,
            "temperature": self._transcript.temperature,
            "avg_logprob": segment.logprob,
            "compression_ratio": len(content) / len(zlib.compress(content)),
            "no_speech_prob": None,
        }

    def _usage(self) -> dict[str, Any]:
        return {"type": "duration", "seconds": round(self._transcript.seconds, 2)}
