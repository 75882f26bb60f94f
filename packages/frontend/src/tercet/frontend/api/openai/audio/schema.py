"""Request schemas of /v1/audio/transcriptions and /v1/audio/translations."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from tercet.frontend.api.openai.sampling_schema import Name, bounded, refuse
from tercet.frontend.errors import BadRequestError

Format = Literal["json", "text", "srt", "verbose_json", "vtt"]
Granularities = Annotated[list[Literal["segment", "word"]], Field(max_length=2)]
Texts = Annotated[list[Name], Field(max_length=64)]
MAX_PROMPT = 65_536


class _AudioRequest(BaseModel):
    """Fields of both requests. All values of a form are text, so numbers and flags are read from text."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    file: bytes
    model: Name
    prompt: Annotated[str, Field(max_length=MAX_PROMPT)] | None = None
    response_format: Format = "json"
    temperature: Annotated[float, bounded("temperature", le=1)] | None = None

    @property
    def has_segments(self) -> bool:
        """Return whether the answer has the time of each segment."""
        return self.response_format in {"srt", "vtt", "verbose_json"}

    @property
    def granularities(self) -> frozenset[str]:
        """Return the parts of `verbose_json` that have times."""
        return frozenset({"segment"})


class TranslationRequest(_AudioRequest):
    """Request for a translation into English."""


class TranscriptionRequest(_AudioRequest):
    """Request for a transcription."""

    language: Annotated[str, Field(min_length=2, max_length=64)] | None = None
    timestamp_granularities: Granularities | None = None
    stream: bool | None = None
    chunking_strategy: Name | None = None
    include: Texts | None = None
    keywords: Texts | None = None
    languages: Texts | None = None
    known_speaker_names: Texts | None = None
    known_speaker_references: Annotated[list[str], Field(max_length=64)] | None = None

    @property
    def granularities(self) -> frozenset[str]:
        return frozenset(self.timestamp_granularities or ["segment"])

    @model_validator(mode="after")
    def _refuse_unsupported(self) -> Any:
        refuse("chunking_strategy", self.chunking_strategy, harmless=self.chunking_strategy == "auto")
        for name in ("include", "keywords", "languages", "known_speaker_names", "known_speaker_references"):
            refuse(name, getattr(self, name), harmless=not getattr(self, name))
        if self.timestamp_granularities and self.response_format != "verbose_json":
            raise BadRequestError(
                "Times are a part of the response format verbose_json only.", param="timestamp_granularities"
            )
        if self.stream and self.has_segments:
            raise BadRequestError("A stream is of the response format json or text.", param="stream")
        return self
