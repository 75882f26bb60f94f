"""Documentation of the routes of the Audio API."""

from typing import Any

from tercet.frontend.api.docs.openapi import MethodAndPath, Operation
from tercet.frontend.api.openai.audio.schema import TranscriptionRequest, TranslationRequest

_RESPONSE: dict[str, Any] = {"text": "A tercet is three lines.", "usage": {"type": "duration", "seconds": 2.5}}
_EXAMPLE = {"file": "bytes of a WAV, FLAC, OGG or MP3", "model": "whisper-large-v3-turbo"}

AUDIO: dict[MethodAndPath, Operation] = {
    ("POST", "/v1/audio/transcriptions"): Operation(
        tag="OpenAI",
        summary="Transcribe audio in its language.",
        answer="The text, or its events; or subtitles, or segments and words with times.",
        body=TranscriptionRequest,
        example={**_EXAMPLE, "language": "en"},
        form=True,
        streams=True,
        response=_RESPONSE,
    ),
    ("POST", "/v1/audio/translations"): Operation(
        tag="OpenAI",
        summary="Translate audio into English.",
        answer="The text; or subtitles, or segments with times.",
        body=TranslationRequest,
        example=_EXAMPLE,
        form=True,
        response=_RESPONSE,
    ),
}
