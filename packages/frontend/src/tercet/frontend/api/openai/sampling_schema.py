"""Request fields that chat and completions share, with their bounds, and the options that they give."""

from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from tercet.frontend.api.openai.token_ids import TokenId
from tercet.frontend.errors import BadRequestError, FieldError, UnsupportedParameterError
from tercet.frontend.manager.inputs.validation import MAX_STOPS
from tercet.frontend.manager.request import GenerationOptions, ParamNames
from tercet.frontend.model.served_model import SamplingDefaults
from tercet.protocol.messages.values import SAMPLING_FIELDS, LogprobParams

_VALUES = [name for name in SAMPLING_FIELDS if name not in {"max_new_tokens", "min_new_tokens", "n", "seed"}]
"""Parameters that every API names as messages do. The others are fields of `GenerationOptions`."""


def bounded(name: str, **own: float) -> Any:
    """Return the API's bounds of a sampling parameter, except those that an endpoint has of its own."""
    api = SAMPLING_FIELDS[name].api
    bounds: dict[str, Any] = {"gt" if api.above else "ge": api.least, "le": api.greatest}
    if "gt" in own:
        bounds.pop("ge", None)
    return Field(**bounds | own)


Count = Annotated[int, bounded("max_new_tokens")]
Name = Annotated[str, Field(max_length=512)]
Metadata = Annotated[dict[Annotated[str, Field(max_length=64)], Name], Field(max_length=16)]
StopString = Annotated[str, Field(min_length=1, max_length=1024)]
Stops = StopString | Annotated[list[StopString], Field(max_length=MAX_STOPS)]
"""OpenAI allows four. Editors with code completion send twenty, code benchmarks six."""


_NOT_SUPPORTED = "{param} is not supported by this server."
_NAMED_KEYS = 4
"""Wrong keys that an error names."""


def _check_keys(bias: dict[str, float]) -> dict[str, float]:
    wrong = [repr(key[:64]) for key in bias if not key.isascii() or not key.isdecimal() or len(key) > 10]
    if wrong:
        raise ValueError(f"keys must be token ids, not {', '.join(wrong[:_NAMED_KEYS])}")
    return bias


LogitBias = Annotated[
    dict[str, Annotated[float, Field(ge=-100, le=100)]],
    Field(max_length=1024, json_schema_extra={"propertyNames": {"pattern": "^[0-9]{1,10}$"}}),
    AfterValidator(_check_keys),
]


def input_shape(given: object) -> str:
    """Return the form of prompts or inputs, the tag of its branch of a union, so that errors concern that form only."""
    first = given[0] if isinstance(given, list) and given else None
    if isinstance(given, str):
        return "a text"
    if isinstance(first, int):
        return "some ids"
    return "lists of ids" if isinstance(first, list) else "some texts"


def biases(bias: dict[str, float] | None) -> dict[int, float]:
    """Return a `LogitBias` by token id."""
    return {int(token_id): value for token_id, value in (bias or {}).items()}


def stop_strings(stop: str | list[str] | None) -> list[str]:
    """Return the field `stop`, in any of its forms, as a list."""
    return [stop] if isinstance(stop, str) else stop or []


def _refuse_request(value: Any) -> Any:
    if value:
        raise FieldError(_NOT_SUPPORTED, error=UnsupportedParameterError)
    return value


UNSUPPORTED = AfterValidator(_refuse_request)
"""Refuses the values of a documented parameter, except those that request nothing: null, false, 0 and empty ones."""
Unsupported = Annotated[Any, UNSUPPORTED]


class Strict(BaseModel):
    """Base of all request schemas: refuses unknown fields, wrong types, and numbers that are not finite."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


class StreamOptions(Strict):
    """Additional content of a stream."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


class FilterFields(Strict):
    """Filters that OpenAI's own API lacks. Chats, completions, responses and /generate take them alike."""

    top_k: Annotated[int, bounded("top_k")] | None = None
    min_p: Annotated[float, bounded("min_p")] | None = None


class OpenAIFields(Strict):
    """OpenAI's fields of chats and completions."""

    model: Name
    frequency_penalty: Annotated[float, bounded("frequency_penalty")] | None = None
    logit_bias: LogitBias | None = None
    max_tokens: Count | None = None
    n: Annotated[int, bounded("n")] | None = None
    presence_penalty: Annotated[float, bounded("presence_penalty")] | None = None
    seed: Annotated[int, bounded("seed")] | None = None
    stop: Stops | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: Annotated[float, bounded("temperature")] | None = None
    top_p: Annotated[float, bounded("top_p")] | None = None
    user: Name | None = None


class SamplingFields(FilterFields, OpenAIFields):
    """Fields of OpenAI's API, followed by extensions that SGLang, vLLM and other servers share."""

    repetition_penalty: Annotated[float, bounded("repetition_penalty")] | None = None
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

    use_beam_search: Annotated[bool | None, UNSUPPORTED] = None
    length_penalty: float | None = None
    bad_words: Annotated[list[Name], Field(max_length=1024), UNSUPPORTED] | None = None
    return_tokens_as_token_ids: Annotated[bool | None, UNSUPPORTED] = None

    @model_validator(mode="after")
    def _refuse_unsupported_sampling(self) -> "SamplingFields":
        refuse("length_penalty", self.length_penalty, harmless=self.length_penalty == 1)
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

    @property
    def candidates(self) -> int:
        """Return the number of choices to generate for each prompt."""
        return self.n or 1

    def options(
        self,
        defaults: SamplingDefaults,
        *,
        max_tokens: int | None,
        logprobs: LogprobParams | None,
        param_names: ParamNames,
        prediction: str = "",
    ) -> GenerationOptions:
        """Return the options of an answer; `defaults` are the model's."""
        return GenerationOptions(
            sampling=sampling_values(self, defaults),
            n=self.candidates,
            max_tokens=max_tokens,
            min_tokens=self.min_tokens or 0,
            seed=self.seed,
            stop=stop_strings(self.stop),
            stop_token_ids=self.stop_token_ids or [],
            include_stop=bool(self.include_stop_str_in_output),
            ignore_eos=bool(self.ignore_eos),
            logit_bias=biases(self.logit_bias),
            skip_special_tokens=self.skip_special_tokens is not False,
            spaces_between_special_tokens=self.spaces_between_special_tokens is not False,
            logprobs=logprobs,
            prediction=prediction,
            priority=self.priority or 0,
            cache_salt=self.cache_salt or "",
            param_names=param_names,
        )


def sampling_values(body: BaseModel, defaults: SamplingDefaults = SamplingDefaults()) -> dict[str, Any]:
    """Return the client's sampling parameters, else those of the model's generation config, else neutral values."""
    values: dict[str, Any] = {}
    for name in _VALUES:
        field = SAMPLING_FIELDS[name]
        given = getattr(body, name, None), getattr(defaults, name, None), field.neutral
        values[name] = field.type(next(value for value in given if value is not None))
    values["top_k"] = max(values["top_k"], 0)
    if values["top_p"] == 0:
        values["temperature"], values["top_p"] = 0.0, 1.0
    return values


def refuse(param: str, value: Any, *, harmless: bool) -> None:
    """Raise UnsupportedParameterError for a documented parameter, unless its value is harmless."""
    if value is not None and not harmless:
        raise UnsupportedParameterError(f"'{param}' is not supported by this server.", param=param)


def refuse_field(field: str, value: Any, *, harmless: bool) -> None:
    """Refuse a documented field of an object within the body, unless its value is harmless. Raises FieldError."""
    if value is not None and not harmless:
        raise FieldError(_NOT_SUPPORTED, field, error=UnsupportedParameterError)
