"""Request schemas of SGLang's /generate, and of /tokenize and /detokenize."""

from collections.abc import Callable, Iterator, Mapping
from functools import cache
from typing import Annotated, Any, ClassVar, NamedTuple, cast

from pydantic import Field, field_validator, model_validator

from tercet.frontend.api.openai.chat_messages import Messages, check_continued, with_reasoning
from tercet.frontend.api.openai.completion_schema import MOST_CHOICES, Batch
from tercet.frontend.api.openai.sampling_schema import (
    Count,
    FilterFields,
    LogitBias,
    Name,
    Stops,
    Strict,
    Unsupported,
    bounded,
    refuse_field,
)
from tercet.frontend.api.openai.structured_schema import NativeStructuredFields
from tercet.frontend.api.openai.token_ids import QUICK_IDS, TokenId
from tercet.frontend.api.openai.tool_schema import Tools, specs_of
from tercet.frontend.api.sglang.session_schema import SessionParams
from tercet.frontend.errors import BadRequestError, UnsupportedParameterError
from tercet.frontend.media.image_decoder import MAX_URL_LENGTH, ImageSource
from tercet.frontend.media.prompt_media import Source
from tercet.frontend.media.sound_decoder import SoundSource
from tercet.frontend.media.video.decoder import MAX_URL_LENGTH as MAX_VIDEO_URL
from tercet.frontend.media.video.decoder import VideoSource
from tercet.frontend.model.prompts import TextPrompt, TokenPrompt
from tercet.frontend.parsers.port import ToolSpec
from tercet.protocol.messages.values import LogprobParams

Text = Annotated[str, Field(max_length=16_777_216)]
ImageUrl = Annotated[str, Field(max_length=MAX_URL_LENGTH)]
_MANY = Field(max_length=MOST_CHOICES, fail_fast=True)
ImageUrls = Annotated[list[ImageUrl], _MANY]
AudioFile = Annotated[str, Field(max_length=MAX_URL_LENGTH)]
AudioFiles = Annotated[list[AudioFile], _MANY]
VideoUrl = Annotated[str, Field(max_length=MAX_VIDEO_URL)]
VideoUrls = Annotated[list[VideoUrl], _MANY]
_MEDIA = (
    ("image_data", "images", "an image"),
    ("video_data", "videos", "a video"),
    ("audio_data", "audio", "an audio clip"),
)
"""Fields of media, and their names in errors."""
_SCHEME = 16
"""Characters in which the scheme of a URL ends."""
TokenIds = Annotated[list[TokenId], Field(min_length=1, max_length=4_194_304, fail_fast=True), QUICK_IDS]


class _NativeLimits(NativeStructuredFields):
    """Fields that come before the filters in the document."""

    max_new_tokens: Count | None = None
    min_new_tokens: Count | None = None
    n: Annotated[int, bounded("n")] | None = None
    temperature: Annotated[float, bounded("temperature", le=100)] | None = None
    top_p: Annotated[float, bounded("top_p", gt=0)] | None = None


class NativeSampling(FilterFields, _NativeLimits):
    """Sampling parameters under SGLang's names."""

    presence_penalty: Annotated[float, bounded("presence_penalty")] | None = None
    frequency_penalty: Annotated[float, bounded("frequency_penalty")] | None = None
    repetition_penalty: Annotated[float, bounded("repetition_penalty")] | None = None
    stop: Stops | None = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=128)] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    no_stop_trim: bool | None = None
    sampling_seed: Annotated[int, bounded("seed")] | None = None
    logit_bias: LogitBias | None = None
    stream_interval: Any = None
    stop_regex: Unsupported = None
    beam_width: Any = None
    custom_params: Unsupported = None
    watermark: Unsupported = None

    @model_validator(mode="after")
    def _refuse_beams(self) -> "NativeSampling":
        refuse_field("beam_width", self.beam_width, harmless=self.beam_width == 1)
        return self


TopLogprobs = Annotated[int, Field(ge=0, le=20)]
LogprobStart = Annotated[int, Field(ge=-1, le=2**31 - 1)]
_PER_PROMPT = ("sampling_params", "return_logprob", "top_logprobs_num", "logprob_start_len", "lora_path")
"""Fields that may be a list with one value for each prompt of a list."""


class PromptOptions(NamedTuple):
    """Options of one prompt. `places` has the index of the prompt, as `[1]`, for each field that is a list."""

    prompt: TextPrompt | TokenPrompt
    sampling: NativeSampling
    logprobs: LogprobParams | None
    logprob_start: int
    adapter: str | None
    places: Mapping[str, str]

    def param(self, name: str) -> str:
        """Return the parameter that has this prompt's value of a field."""
        return name + self.places[name]


class NativeInputs(Strict):
    """Inputs of a request, as text or as token ids."""

    text: str | list[str] | None = None
    input_ids: list[int] | list[list[int]] | None = None

    @property
    def is_batch(self) -> bool:
        """Return whether the inputs are a list, which is answered with a list."""
        return isinstance(self.text, list) or (self.input_ids is not None and isinstance(self.input_ids[0], list))

    def _require_one_form(self) -> None:
        if (self.text is None) == (self.input_ids is None):
            raise BadRequestError("Give either 'text' or 'input_ids'.", param="text")


class NativeGenerate(NativeInputs):
    """Request of /generate: one or several prompts, as text or as token ids."""

    text: Text | Annotated[list[Text], Batch] | None = None
    input_ids: TokenIds | Annotated[list[TokenIds], Batch] | None = None
    model: Name | None = None
    sampling_params: NativeSampling | Annotated[list[NativeSampling], Batch] = NativeSampling()
    stream: bool | None = None
    return_logprob: bool | Annotated[list[bool], Batch] | None = None
    top_logprobs_num: TopLogprobs | Annotated[list[TopLogprobs], Batch] | None = None
    logprob_start_len: LogprobStart | Annotated[list[LogprobStart], Batch] | None = None
    rid: Name | None = None
    return_text_in_logprobs: bool | None = None
    return_prompt_token_ids: bool | None = None
    priority: Annotated[int, Field(ge=-(2**31), le=2**31 - 1)] | None = None
    cache_salt: Annotated[str, Field(max_length=256)] | None = None
    session_params: SessionParams | None = None
    lora_path: Name | Annotated[list[Name | None], Batch] | None = None
    extra_key: Annotated[str, Field(max_length=256)] | None = None
    log_metrics: Any = None
    no_logs: Unsupported = None
    custom_labels: Any = None
    conversation_id: Any = None
    routing_key: Any = None
    session_id: Any = None
    external_trace_header: Any = None
    return_hidden_states: Unsupported = None
    return_routed_experts: Unsupported = None
    routed_experts_start_len: Unsupported = None
    return_indexer_topk: Unsupported = None
    token_ids_logprob: Unsupported = None
    return_sampling_mask: Unsupported = None
    sampling_logprobs_mode: Unsupported = None
    return_flat_raw_top_logprobs: Unsupported = None
    return_flat_raw_output_top_logprobs: Unsupported = None
    return_flat_raw_top_logprobs_b64: Unsupported = None
    return_entropy: Unsupported = None
    return_bytes: Unsupported = None
    input_embeds: Unsupported = None
    positional_embed_overrides: Unsupported = None
    image_data: ImageUrl | Annotated[list[ImageUrl | ImageUrls | None], _MANY] | None = None
    video_data: VideoUrl | Annotated[list[VideoUrl | VideoUrls | None], _MANY] | None = None
    audio_data: AudioFile | Annotated[list[AudioFile | AudioFiles | None], _MANY] | None = None
    use_audio_in_video: Unsupported = None
    video_config: Unsupported = None
    modalities: Unsupported = None
    mm_hashes: Unsupported = None
    mm_content_hashes: Unsupported = None
    mm_processor_kwargs: Unsupported = None
    images_config: Unsupported = None
    custom_logit_processor: Unsupported = None
    watermark: Unsupported = None
    require_reasoning: Unsupported = None
    max_thinking_tokens: Unsupported = None
    background: Unsupported = None
    bootstrap_host: Unsupported = None
    bootstrap_port: Unsupported = None
    bootstrap_room: Unsupported = None
    routed_dp_rank: Unsupported = None
    data_parallel_rank: Unsupported = None
    disagg_prefill_dp_rank: Unsupported = None
    kv_hints: Unsupported = None
    multi_item_delimiter_indices: Unsupported = None
    token_indices_to_pool: Unsupported = None

    @model_validator(mode="after")
    def _check_prompt(self) -> "NativeGenerate":
        self._require_one_form()
        if self.is_batch and self.session_params is not None:
            raise BadRequestError("A turn of a session has one prompt.", param="session_params")
        if self.rid is not None and (self.is_batch or self.session_params is not None):
            raise BadRequestError("'rid' is for one prompt outside a session: leave it out.", param="rid")
        if self.extra_key is not None and self.cache_salt is not None:
            raise BadRequestError("Give only one of 'cache_salt' and 'extra_key'.", param="extra_key")
        self._check_images()
        prompts = len(self.text or self.input_ids or ()) if self.is_batch else 1
        for name in _PER_PROMPT:
            given = getattr(self, name)
            if isinstance(given, list) and not (self.is_batch and len(given) == prompts):
                raise BadRequestError(f"A list of '{name}' has one for each prompt of a list.", param=name)
        params = self.sampling_params
        choices = sum(each.n or 1 for each in params) if isinstance(params, list) else prompts * (params.n or 1)
        if choices > MOST_CHOICES:
            param = "sampling_params" if isinstance(params, list) else "sampling_params.n"
            raise BadRequestError(f"A request can ask for {MOST_CHOICES} choices in all.", param=param)
        return self

    def _check_images(self) -> None:
        if self.audio_data and (self.image_data or self.video_data):
            raise UnsupportedParameterError("A model takes images or audio, not both.", param="audio_data")
        for param, noun, one in _MEDIA:
            if not (given := getattr(self, param)):
                continue
            if self.text is None:
                raise UnsupportedParameterError(
                    f"{noun.capitalize()} go with a 'text' that has their places.", param=param
                )
            if self.session_params is not None:
                raise UnsupportedParameterError(f"A turn of a session has no {noun}.", param=param)
            if self.is_batch and not (isinstance(given, list) and len(given) == len(self.text)):
                raise BadRequestError(f"'{param}' has the {noun} of each prompt of a list.", param=param)
            if not self.is_batch and not (isinstance(given, str) or all(isinstance(each, str) for each in given)):
                raise BadRequestError(f"'{param}' of one prompt is {one} or a list of them.", param=param)

    def images(self) -> list[list[Source]]:
        """Return the images, clips or sounds of each prompt that is a text."""
        if not self.is_batch:
            return [[source for param, *_ in _MEDIA for source in _sources(getattr(self, param), param)]]
        none = [None] * len(self.text or ())
        return [
            [
                source
                for param, *_ in _MEDIA
                for source in _sources((getattr(self, param) or none)[place], f"{param}[{place}]")
            ]
            for place in range(len(none))
        ]

    def adapters(self) -> dict[str, str]:
        """Return the names of the adapters, each with the parameter that names it first."""
        params: dict[str, str] = {}
        for place, name in enumerate(self.lora_path if isinstance(self.lora_path, list) else [self.lora_path]):
            if name is not None:
                params.setdefault(name, f"lora_path[{place}]" if isinstance(self.lora_path, list) else "lora_path")
        return params

    def prompt_options(self) -> Iterator[PromptOptions]:
        """Yield the options of each prompt."""
        for place, prompt in enumerate(self.prompts()):
            yield self._options(place, prompt)

    def _options(self, place: int, prompt: TextPrompt | TokenPrompt) -> PromptOptions:
        def own(name: str) -> Any:
            given = getattr(self, name)
            return given[place] if isinstance(given, list) else given

        start = own("logprob_start_len")
        scored = bool(own("return_logprob"))
        top, of_prompt = own("top_logprobs_num") or 0, start is not None and start >= 0
        return PromptOptions(
            prompt=prompt,
            sampling=own("sampling_params"),
            logprobs=LogprobParams(top=top, prompt=of_prompt) if scored else None,
            logprob_start=max(start or 0, 0) if scored else 0,
            adapter=own("lora_path"),
            places={name: f"[{place}]" if isinstance(getattr(self, name), list) else "" for name in _PER_PROMPT},
        )

    def prompts(self) -> list[TextPrompt | TokenPrompt]:
        if self.text is not None:
            if isinstance(self.text, str):
                return [TextPrompt(self.text, param="text", images=self.images()[0])]
            return [
                TextPrompt(text, param=f"text[{place}]", images=images)
                for place, (text, images) in enumerate(zip(self.text, self.images(), strict=True))
            ]
        # The schema has checked the elements. There may be millions, so they are not checked again.
        if not self.is_batch:
            return [TokenPrompt(cast("list[int]", self.input_ids), param="input_ids")]
        batch = cast("list[list[int]]", self.input_ids)
        return [TokenPrompt(each, param=f"input_ids[{place}]") for place, each in enumerate(batch)]


def _sources(given: Any, param: str) -> list[Source]:
    """Return images, clips or sounds, which may be `data:` URLs or files in base64; the first two also URLs of allowed
    hosts.
    """
    of: Callable[[str, str], Source] = _image
    if not param.startswith("image_data"):
        of = _video if param.startswith("video_data") else _sound
    if not isinstance(given, list):
        return [of(given, param)] if given else []
    return [of(each, f"{param}[{step}]") for step, each in enumerate(given)]


def _image(given: str, param: str) -> ImageSource:
    return ImageSource(url=_url_of(given), param=param)


def _video(given: str, param: str) -> VideoSource:
    return VideoSource(url=_url_of(given), param=param)


def _url_of(given: str) -> str:
    return given if ":" in given[:_SCHEME] else f"data:;base64,{given}"


def _sound(given: str, param: str) -> SoundSource:
    return SoundSource(base64=given.partition(",")[2] if given.startswith("data:") else given, param=param)


class Tokenize(Strict):
    """Text, texts or chat to tokenize."""

    reasoning_field: ClassVar[str] = "reasoning_content"
    """Name of the reasoning field, as in chats."""

    model: Name | None = None
    prompt: Text | Annotated[list[Text], Batch] | None = None
    messages: Messages | None = None
    tools: Tools | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    return_token_strs: bool | None = None

    @field_validator("messages", mode="before")
    @classmethod
    def _rename_reasoning_field(cls, messages: object) -> object:
        return with_reasoning(messages, cls.reasoning_field)

    @model_validator(mode="after")
    def _check_prompt(self) -> "Tokenize":
        if (self.prompt is None) == (self.messages is None):
            raise BadRequestError("Give either 'prompt' or 'messages'.", param="prompt")
        if self.tools and self.messages is None:
            raise BadRequestError("'tools' go with 'messages'.", param="tools")
        if self.continue_final_message:
            check_continued(self.messages, add_generation_prompt=self.add_generation_prompt)
        return self

    @property
    def adds_generation_prompt(self) -> bool:
        """Return whether the chat ends with the beginning of an answer: by default, unless its end is continued."""
        default = not self.continue_final_message
        return default if self.add_generation_prompt is None else self.add_generation_prompt

    def specs(self) -> tuple[ToolSpec, ...]:
        return specs_of(self.tools or ())


@cache
def tokenize_request(name: str) -> type[Tokenize]:
    """Return the schema for a server with this reasoning field."""

    class Named(Tokenize):
        reasoning_field = name

    return Named


Ids = Annotated[list[TokenId], Field(max_length=4_194_304, fail_fast=True), QUICK_IDS]


class Detokenize(Strict):
    """Token ids to turn into text, or several lists of them."""

    model: Name | None = None
    tokens: Ids | Annotated[list[Ids], Batch]
    skip_special_tokens: bool | None = None
