"""Transcripts by language models that hear: the file is a sound in a prompt of the model's own form."""

import asyncio
from base64 import b64encode
from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import Response

from tercet.frontend.api.generation_response import FinishedChoice, respond
from tercet.frontend.api.openai.audio.languages import NAMES, code_of
from tercet.frontend.api.openai.audio.schema import Format, TranscriptionRequest
from tercet.frontend.api.openai.audio.transcripts import MEDIA_TYPES
from tercet.frontend.api.openai.usage import usage
from tercet.frontend.errors import BadRequestError, UnsupportedParameterError
from tercet.frontend.http.loop_turns import Steps
from tercet.frontend.http.sse import event
from tercet.frontend.manager.req_state import Generation, GenerationUpdate, ReqState
from tercet.frontend.manager.request import GenerateRequest, GenerationOptions, ParamNames
from tercet.frontend.manager.tokenizer_manager import TokenizerManager
from tercet.frontend.media.sound_decoder import SoundSource
from tercet.frontend.model.prompts import TextPrompt
from tercet.frontend.model.served_model import ServedModel
from tercet.protocol.messages.audio import SoundFormat


async def transcribe_sound(
    request: Request, manager: TokenizerManager, model: ServedModel, form: SoundFormat, body: TranscriptionRequest
) -> Response:
    """Return the text of a file, whole or as a stream. Raises ApiError."""
    for name in ("prompt", "timestamp_granularities"):
        if getattr(body, name):
            raise UnsupportedParameterError(f"The model {model.name!r} takes no {name!r} of transcripts.", param=name)
    if body.has_segments:
        raise UnsupportedParameterError(
            f"The model {model.name!r} has no times: its transcripts are json or text.", param="response_format"
        )
    code = code_of(body.language) if body.language is not None else ""
    if code and code not in NAMES:
        raise BadRequestError(f"{body.language!r} is no language.", param="language")
    file = await asyncio.to_thread(b64encode, body.file)
    prompt = TextPrompt(
        form.transcription.format(language=f"lang:{code}" if code else ""),
        add_special_tokens=False,
        param="file",
        images=[SoundSource(base64=file.decode(), param="file")],
    )
    options = GenerationOptions(
        sampling={"temperature": body.temperature or 0.0}, param_names=ParamNames(max_tokens="file", n="file")
    )
    work = GenerateRequest(model=model.base, prompt=prompt, options=options)
    writer, media_type = SoundTranscriptWriter(body.response_format), MEDIA_TYPES[body.response_format]
    return await respond(request, manager, [work], writer, stream=bool(body.stream), media_type=media_type)


class SoundTranscriptWriter:
    """Writer of the text of one sound."""

    def __init__(self, form: Format) -> None:
        self._form = form
        self._sent = ""

    def prepare(self, state: ReqState) -> Steps[None]:  # noqa: ARG002
        """Do nothing: events are short."""
        yield from ()

    def events(self, generation: Generation, arrivals: list[GenerationUpdate]) -> bytes:  # noqa: ARG002
        """Return an event with the new text."""
        new = "".join(arrival.update.text for arrival in arrivals)
        if not self._sent:
            new = new.lstrip()
        self._sent += new
        return event(orjson.dumps({"type": "transcript.text.delta", "delta": new})) if new else b""

    def end(self, generation: Generation) -> bytes:
        """Return the event with the whole text."""
        text = self._sent.rstrip()
        return event(orjson.dumps({"type": "transcript.text.done", "text": text, "usage": _usage(generation)}))

    def full_response(self, generation: Generation, choices: list[FinishedChoice]) -> Steps[bytes]:
        """Return the body in the request's format."""
        yield from ()
        text = choices[0].text.strip()
        return (
            text.encode() + b"\n" if self._form == "text" else orjson.dumps({"text": text, "usage": _usage(generation)})
        )


def _usage(generation: Generation) -> dict[str, Any]:
    """Return the tokens of a transcript in the form of OpenAI's Audio API."""
    counts = usage(generation)
    heard = counts["prompt_tokens_details"]["audio_tokens"]
    return {
        "type": "tokens",
        "input_tokens": counts["prompt_tokens"],
        "input_token_details": {"text_tokens": counts["prompt_tokens"] - heard, "audio_tokens": heard},
        "output_tokens": counts["completion_tokens"],
        "total_tokens": counts["total_tokens"],
    }
