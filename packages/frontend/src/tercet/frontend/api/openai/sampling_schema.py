"""Request fields that chat and completions share, with their bounds, and the sampling parameters they yield."""

from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from tercet.frontend.errors import BadRequestError, UnsupportedParameterError
from tercet.frontend.manager.validation import MAX_STOPS
from tercet.frontend.model.served_model import SamplingDefaults
from tercet.protocol.messages.values import SamplingParams

Count = Annotated[int, Field(ge=0, le=2**31 - 1)]
TokenId = Annotated[int, Field(ge=0, le=2**31 - 1)]
Name = Annotated[str, Field(max_length=512)]
StopString = Annotated[str, Field(min_length=1, max_length=1024)]
Stops = StopString | Annotated[list[StopString], Field(max_length=MAX_STOPS)]
"""OpenAI allows four. Editors with code completion send twenty, code benchmarks six."""


def _check_keys(bias: dict[str, float]) -> dict[str, float]:
    for key in bias:
        if not key.isascii() or not key.isdecimal() or len(key) > 10:
            raise ValueError("keys must be token ids")
    return bias


LogitBias = Annotated[
    dict[str, Annotated[float, Field(ge=-100, le=100)]],
    Field(max_length=1024, json_schema_extra={"propertyNames": {"pattern": "^[0-9]{1,10}$"}}),
    AfterValidator(_check_keys),
]


def biases(bias: dict[str, float] | None) -> dict[int, float]:
    """Return a `LogitBias` by token id."""
    return {int(token_id): value for token_id, value in (bias or {}).items()}


def stop_strings(stop: str | list[str] | None) -> list[str]:
    """Return the field `stop`, in any of its forms, as a list."""
    return [stop] if isinstance(stop, str) else stop or []


class Strict(BaseModel):
    """Base of all request schemas: refuses unknown fields, wrong types, and numbers that are not finite."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


class StreamOptions(Strict):
    """Additional content of a stream."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


class SamplingFields(Strict):
    """Fields of OpenAI's API, followed by extensions that SGLang, vLLM and other servers share."""

    model: Name
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    logit_bias: LogitBias | None = None
    max_tokens: Count | None = None
    n: Annotated[int, Field(ge=1, le=128)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), le=2**63 - 1)] | None = None
    stop: Stops | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    user: Name | None = None

    top_k: Annotated[int, Field(ge=-1, le=2**31 - 1)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=10)] | None = None
    min_tokens: Count | None = None
    ignore_eos: bool | None = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=128)] | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    prompt_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    return_token_ids: bool | None = None
    priority: Annotated[int, Field(ge=-(2**31), le=2**31 - 1)] | None = None
    cache_salt: Annotated[str, Field(max_length=256)] | None = None

    use_beam_search: bool | None = None
    length_penalty: float | None = None
    bad_words: Annotated[list[Name], Field(max_length=1024)] | None = None
    return_tokens_as_token_ids: bool | None = None

    @model_validator(mode="after")
    def _refuse_unsupported_sampling(self) -> "SamplingFields":
        refuse("length_penalty", self.length_penalty, harmless=self.length_penalty == 1)
        for name in ("use_beam_search", "bad_words", "return_tokens_as_token_ids"):
            value = getattr(self, name)
            refuse(name, value, harmless=not value)
        return self

    @model_validator(mode="after")
    def _check_stream_options(self) -> "SamplingFields":
        if self.stream_options is not None and not self.stream:
            raise BadRequestError("'stream_options' is only allowed when 'stream' is true.", param="stream_options")
        return self

    @model_validator(mode="after")
    def _refuse_streamed_prompt_logprobs(self) -> "SamplingFields":
        if self.prompt_logprobs is not None and self.stream:
            raise BadRequestError("'prompt_logprobs' are not available in a stream.", param="prompt_logprobs")
        return self

    @property
    def include_usage(self) -> bool:
        """Return whether a stream ends with a chunk of token counts."""
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        """Return whether each chunk of a stream has the current token counts."""
        return self.include_usage and bool(self.stream_options and self.stream_options.continuous_usage_stats)

    def sampling(self, defaults: SamplingDefaults) -> SamplingParams:
        """Return the client's values, else those of the model's generation config, else OpenAI's defaults."""
        temperature = _first(self.temperature, defaults.temperature, 1.0)
        top_p = _first(self.top_p, defaults.top_p, 1.0)
        return SamplingParams(
            max_new_tokens=0,
            min_new_tokens=self.min_tokens or 0,
            n=self.n or 1,
            temperature=temperature if top_p > 0 else 0.0,
            top_p=top_p if top_p > 0 else 1.0,
            top_k=max(int(_first(self.top_k, defaults.top_k, 0)), 0),
            min_p=_first(self.min_p, defaults.min_p, 0.0),
            presence_penalty=self.presence_penalty or 0.0,
            frequency_penalty=self.frequency_penalty or 0.0,
            repetition_penalty=_first(self.repetition_penalty, defaults.repetition_penalty, 1.0),
            stop_token_ids=self.stop_token_ids or [],
            ignore_eos=bool(self.ignore_eos),
            logit_bias=biases(self.logit_bias),
        )


def _first(*values: float | None) -> float:
    """Return the first value that is set. The last one always is."""
    return next(value for value in values if value is not None)


def refuse(param: str, value: Any, *, harmless: bool) -> None:
    """Raise UnsupportedParameterError for a documented parameter, unless its value is harmless."""
    if value is not None and not harmless:
        raise UnsupportedParameterError(f"'{param}' is not supported by this server.", param=param)
