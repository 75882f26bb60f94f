"""The /v1/audio/transcriptions and /v1/audio/translations endpoints."""

from itertools import accumulate
from typing import TypeVar

from msgspec import structs
from pydantic import ValidationError
from starlette.requests import Request
from starlette.responses import Response

from tercet.frontend.api.generation_response import respond
from tercet.frontend.api.openai.audio.attempts import TEMPERATURES, Attempts, generated
from tercet.frontend.api.openai.audio.languages import code_of
from tercet.frontend.api.openai.audio.schema import TranscriptionRequest, TranslationRequest
from tercet.frontend.api.openai.audio.sound_transcripts import transcribe_sound
from tercet.frontend.api.openai.audio.transcript_body import Transcript, TranscriptBody
from tercet.frontend.api.openai.audio.transcripts import MEDIA_TYPES, TranscriptWriter
from tercet.frontend.errors import BadRequestError, PayloadTooLargeError, ServerError, UnsupportedParameterError
from tercet.frontend.http.auth import caller_of
from tercet.frontend.http.loop_turns import turns_of
from tercet.frontend.http.memory_budget import MemoryBudget
from tercet.frontend.http.multipart_form import read_form
from tercet.frontend.http.request_body import validation_error
from tercet.frontend.http.route import Route
from tercet.frontend.http.sse import cancel_on_disconnect
from tercet.frontend.manager.request import GenerateRequest, GenerationOptions, ParamNames
from tercet.frontend.manager.tokenizer_manager import TokenizerManager
from tercet.frontend.media.audio_decoder import DecodedAudio
from tercet.frontend.model.prompts import TextPrompt, TokenPrompt
from tercet.frontend.model.served_model import ServedModel
from tercet.protocol.messages import audio
from tercet.protocol.messages.audio import AudioFormat, TranscriptTokens
from tercet.protocol.messages.values import LogprobParams

MAX_FILE_BYTES = 26_214_400
"""Maximum bytes of a file: OpenAI's 25 MB."""
_FORM_BYTES = 1_048_576
"""Bytes of a body beside the file."""
_SAMPLE_BYTES = 2
_PARAMS = ParamNames(max_tokens="file", n="file")
AudioT = TypeVar("AudioT", TranscriptionRequest, TranslationRequest)


class OpenAIServingAudio:
    """OpenAI's endpoints for models that turn audio into text."""

    def __init__(self, manager: TokenizerManager, body_limit: int) -> None:
        self._manager = manager
        self._body_limit = min(body_limit, MAX_FILE_BYTES + _FORM_BYTES)

    @property
    def routes(self) -> list[Route]:
        return [
            Route("POST", "/v1/audio/transcriptions", self.transcribe),
            Route("POST", "/v1/audio/translations", self.translate),
        ]

    async def transcribe(self, request: Request) -> Response:
        """Return the text of audio, in its language."""
        body = await self._read(request, TranscriptionRequest)
        return await self._respond(request, body, "transcribe", body.language, stream=bool(body.stream))

    async def translate(self, request: Request) -> Response:
        """Return the text of audio in English."""
        return await self._respond(request, await self._read(request, TranslationRequest), "translate", None)

    async def _read(self, request: Request, schema: type[AudioT]) -> AudioT:
        form = await read_form(request, self._body_limit)
        try:
            body = schema.model_validate(form)
        except ValidationError as error:
            raise validation_error(error, form, schema) from None
        if len(body.file) > MAX_FILE_BYTES:
            raise PayloadTooLargeError(f"The file is longer than {MAX_FILE_BYTES} bytes.")
        return body

    async def _respond(
        self,
        request: Request,
        body: TranscriptionRequest | TranslationRequest,
        task: str,
        language: str | None,
        *,
        stream: bool = False,
    ) -> Response:
        model = await self._manager.adapters.model(body.model)
        sounds = model.limits.sounds
        if sounds is not None and sounds.transcription and isinstance(body, TranscriptionRequest):
            return await transcribe_sound(request, self._manager, model, sounds, body)
        model.check_audio(given=True)
        form = model.limits.audio
        assert form is not None
        code = _checked_language(language, task, form.tokens, model)
        _check_times(body, form, model)
        before = await _before(body.prompt, form.tokens, model)
        decoding = self._manager.audio.decode(body.file, form.rate, form.samples, "file")
        windows = await cancel_on_disconnect(request, decoding)
        ends = [samples / form.rate for samples in accumulate(len(each.samples) // _SAMPLE_BYTES for each in windows)]
        budget = request.app.state.body_budget
        assert isinstance(budget, MemoryBudget)
        with budget.reserve(caller_of(request).owner) as reservation:  # until the end of the request
            reservation.grow(sum(len(each.samples) for each in windows))
        if form.tokens.languages and not code:
            code = await cancel_on_disconnect(request, self._detect(model, form.tokens, windows[0]))
        prompt = [*before, *_prompt(form.tokens, code, task, timed=body.has_segments)]
        temperature = body.temperature or 0.0
        temperatures = TEMPERATURES if body.temperature is None and not stream else (temperature,)
        scored = body.response_format == "verbose_json" or len(temperatures) > 1
        options = GenerationOptions(
            sampling={"temperature": temperature},
            logprobs=LogprobParams() if scored else None,
            param_names=_PARAMS,
        )
        kind = audio.Transcript.TIMESTAMPS if body.has_segments else audio.Transcript.TEXT
        work = [_request(model, prompt, options, window, kind) for window in windows]
        transcript = Transcript(
            task=task, format=body.response_format, granularities=body.granularities, language=code, ends=ends
        )
        media_type = MEDIA_TYPES[body.response_format]
        if len(temperatures) == 1 and "word" not in body.granularities:
            writer = TranscriptWriter(model, form, transcript, temperature)
            return await respond(request, self._manager, work, writer, stream=stream, media_type=media_type)
        attempts = Attempts(self._manager, model, form.tokens, prompt)
        outcomes = await cancel_on_disconnect(request, attempts.outcomes(work, temperatures))
        if "word" in body.granularities:
            outcomes = await cancel_on_disconnect(request, attempts.with_times(work, outcomes))
        writing = TranscriptBody(model, form, transcript).written(outcomes)
        written = turns_of(request).run(caller_of(request).owner, writing)
        return Response(await cancel_on_disconnect(request, written), media_type=media_type)

    async def _detect(self, model: ServedModel, tokens: TranscriptTokens, window: DecodedAudio) -> str:
        """Return the code of the language of a window. Raises ApiError."""
        options = GenerationOptions(sampling={"temperature": 0.0}, max_tokens=1, param_names=_PARAMS)
        work = _request(model, [tokens.start], options, window, audio.Transcript.LANGUAGE)
        [choice] = await generated(self._manager, [work])
        [token] = choice.token_ids
        code = next((code for code, language in tokens.languages.items() if language == token), None)
        if code is None:
            raise ServerError("The scheduler found no language of this model.")
        return code


def _checked_language(language: str | None, task: str, tokens: TranscriptTokens, model: ServedModel) -> str:
    """Return the code of the client's language; empty if it named none. Raises BadRequestError."""
    if task == "translate" and tokens.translate is None:
        raise BadRequestError(f"The model {model.name!r} transcribes one language and translates none.", param="model")
    if language is None:
        return ""
    code = code_of(language)
    if tokens.languages and code not in tokens.languages:
        known = ", ".join(sorted(tokens.languages))
        raise BadRequestError(f"{language!r} is none of this model's languages: {known}.", param="language")
    if not tokens.languages and code != "en":
        raise BadRequestError(f"The model {model.name!r} transcribes English only.", param="language")
    return code


def _check_times(body: TranscriptionRequest | TranslationRequest, form: AudioFormat, model: ServedModel) -> None:
    """Refuse times of words that the model does not have. Raises UnsupportedParameterError."""
    if "word" in body.granularities and not form.token_times:
        raise UnsupportedParameterError(
            f"The model {model.name!r} has no times of words: its generation_config.json has no alignment_heads.",
            param="timestamp_granularities",
        )


async def _before(text: str | None, tokens: TranscriptTokens, model: ServedModel) -> list[int]:
    """Return the tokens of the text before the audio, at most half of the context, and the token before these."""
    if not text or not text.strip():
        return []
    if tokens.previous is None:
        raise UnsupportedParameterError("This model takes no text before the audio.", param="prompt")
    escaped = model.tokenizer.escape_special(f" {text.strip()}", param="prompt")
    ids = await model.tokenize(TextPrompt(escaped, add_special_tokens=False, param="prompt"), must_fit=False)
    return [tokens.previous, *ids[-(model.context // 2 - 1) :]]


def _prompt(tokens: TranscriptTokens, code: str, task: str, *, timed: bool) -> list[int]:
    prompt = [tokens.start]
    if tokens.languages:
        named = tokens.translate if task == "translate" else tokens.transcribe
        prompt += [tokens.languages[code], *([] if named is None else [named])]
    return prompt if timed else [*prompt, tokens.no_timestamps]


def _request(
    model: ServedModel,
    prompt: list[int],
    options: GenerationOptions,
    window: DecodedAudio,
    transcript: audio.Transcript,
) -> GenerateRequest:
    return GenerateRequest(
        model=model.base,
        prompt=TokenPrompt(prompt, param="file"),
        options=options,
        audio=structs.replace(window, transcript=transcript),
    )
