"""Responses with transcripts whose windows are generated once, whole or as a stream."""

import orjson

from tercet.frontend.api.generation_response import FinishedChoice
from tercet.frontend.api.openai.audio.schema import Format
from tercet.frontend.api.openai.audio.transcript_body import Outcome, Transcript, TranscriptBody
from tercet.frontend.http.loop_turns import Steps
from tercet.frontend.http.sse import event
from tercet.frontend.manager.req_state import Generation, GenerationUpdate, ReqState
from tercet.frontend.model.served_model import ServedModel
from tercet.protocol.messages.audio import AudioFormat

MEDIA_TYPES: dict[Format, str] = {
    "json": "application/json",
    "text": "text/plain; charset=utf-8",
    "srt": "application/x-subrip; charset=utf-8",
    "verbose_json": "application/json",
    "vtt": "text/vtt; charset=utf-8",
}


class TranscriptWriter:
    """Writer of transcripts, whose windows are the prompts of a generation. They may end in any order."""

    def __init__(self, model: ServedModel, form: AudioFormat, transcript: Transcript, temperature: float) -> None:
        self._model = model
        self._form = form
        self._transcript = transcript
        self._temperature = temperature
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
        done = {"type": "transcript.text.done", "text": self._sent.rstrip(), "usage": self._transcript.usage}
        return event(orjson.dumps(done))

    def full_response(self, generation: Generation, choices: list[FinishedChoice]) -> Steps[bytes]:  # noqa: ARG002
        """Return the body in the request's format."""
        body = TranscriptBody(self._model, self._form, self._transcript)
        return body.written([Outcome(choice=each, temperature=self._temperature) for each in choices])
