"""Served model: tokenizer, template and limits."""

import copy
import hashlib
import time
from collections.abc import Mapping, Sequence
from functools import cached_property, partial
from typing import Annotated, Any

import msgspec

from tercet.frontend.__about__ import __version__
from tercet.frontend.constraints import Tokens
from tercet.frontend.errors import BadRequestError, ContextLengthExceededError
from tercet.frontend.media.prompt_media import Decoded, replacements_of
from tercet.frontend.model.chat_template import TemplateManager
from tercet.frontend.model.files import read_text, reading
from tercet.frontend.model.prompts import ChatPrompt, Prompt, TextPrompt, TokenPrompt, size_of
from tercet.frontend.model.sentence_files import SentenceFiles
from tercet.frontend.model.special_text import SpecialTexts
from tercet.frontend.model.token_bytes import TokenBytes
from tercet.frontend.model.tokenizer import PromptTokenizer
from tercet.frontend.model.tokenizer_pool import Piece, TokenizerPool
from tercet.protocol.json_files import error_line, read_object
from tercet.protocol.messages.values import SAMPLING_FIELDS, LoRAAdapter, ModelIdentity, ModelLimits

_PROMPT_END = 256
"""Characters that `render_end` returns."""
_COUNTED_CHARS = 1 << 20
_COUNTED_CHARS_A_TOKEN = 64
"""Maximum characters of a text that is only counted: the larger of the total and the product with the context."""


def _bounded(name: str) -> msgspec.Meta:
    """Return the API's bounds of a sampling parameter."""
    api = SAMPLING_FIELDS[name].api
    return msgspec.Meta(gt=api.least, le=api.greatest) if api.above else msgspec.Meta(ge=api.least, le=api.greatest)


class SamplingDefaults(msgspec.Struct, frozen=True):
    """Sampling defaults from generation_config.json."""

    temperature: Annotated[float, msgspec.Meta(ge=0, le=100)] | None = None
    top_p: Annotated[float, _bounded("top_p")] | None = None
    top_k: Annotated[int, _bounded("top_k")] | None = None
    min_p: Annotated[float, _bounded("min_p")] | None = None
    repetition_penalty: Annotated[float, _bounded("repetition_penalty")] | None = None


class ModelFiles:
    """Tokenizer, template and settings from a model's files. Raises ValueError for files that cannot be read.

    `chat_template` is the source of a template in place of the model's.
    """

    def __init__(self, files: dict[str, bytes], chat_template: str | None = None) -> None:
        if "tokenizer.json" not in files:
            raise ValueError("the model has no tokenizer.json")
        self.tokenizer_json = files["tokenizer.json"]
        self.tokenizer_sha = hashlib.sha256(files["tokenizer.json"]).hexdigest()
        with reading("tokenizer.json"):
            self.tokenizer = PromptTokenizer(read_text(files, "tokenizer.json"))
            self.token_bytes = TokenBytes(self.tokenizer)
            self.special_texts = SpecialTexts(map(self.tokenizer.token, self.tokenizer.special_ids))
        with reading("the chat template"):
            self.template = TemplateManager.from_files(files, chat_template)
        self.chat_template = chat_template
        with reading("the files of sentence-transformers"):
            self.sentences = SentenceFiles(files)
        self.defaults = _defaults(read_object(files, "generation_config.json"))


class ServedModel:
    """Model, or adapter of a model (`lora`), that schedulers serve."""

    def __init__(
        self,
        name: str,
        files: ModelFiles,
        limits: ModelLimits,
        identity: ModelIdentity,
        tokenizer_pool: TokenizerPool | None = None,
        software: str = "",
    ) -> None:
        self.name = self.base = name
        self.lora: LoRAAdapter | None = None
        self.tokenizer_pool = tokenizer_pool or TokenizerPool()
        self.files = files
        self.limits = limits
        self.identity = identity
        self.software = software
        """Software version of its first scheduler."""
        self.created = int(time.time())
        # The weights' digest covers dtype and quantization.
        made_of = [__version__, software, identity.weights, sorted(identity.files.items())]
        self.fingerprint = _fingerprint(*made_of, *([files.chat_template] if files.chat_template is not None else []))

    def with_adapter(self, name: str, lora: LoRAAdapter, created: int) -> "ServedModel":
        """Return a copy with an adapter under its own name; `base` remains the model's name."""
        model = copy.copy(self)
        model.name, model.lora, model.created = name, lora, created
        model.fingerprint = _fingerprint(self.fingerprint, lora.sha256)
        return model

    @property
    def context(self) -> int:
        """Return the maximum number of prompt and output tokens of a request."""
        return context_of(self.limits)

    @property
    def longest_prompt(self) -> int:
        """Return the maximum number of prompt tokens: those that an encoder reads, or else the context."""
        return self.context if self.limits.encoder is None else self.limits.encoder.tokens

    def context_tokens(self, prompt_tokens: int, param: str) -> int:
        """Return the tokens of the context that a prompt takes: where an encoder reads it, the decoder's first ones.

        Raises ContextLengthExceededError for more than an encoder reads.
        """
        encoder = self.limits.encoder
        if encoder is None:
            return prompt_tokens
        if prompt_tokens > encoder.tokens:
            raise self._too_long(param, f"{prompt_tokens} tokens", prompt_tokens)
        return len(encoder.start)

    @cached_property
    def tokens(self) -> Tokens:
        """Return the part of the vocabulary that grammars need."""
        added = {self.tokenizer.token(token_id): token_id for token_id in self.tokenizer.added_ids}
        return Tokens(added=added, eos=self.limits.eos_token_ids)

    @property
    def tokenizer(self) -> PromptTokenizer:
        return self.files.tokenizer

    async def tokenize(self, prompt: Prompt, images: Sequence[Decoded] = (), *, must_fit: bool = True) -> list[int]:
        """Run `prompt_ids` in the tokenizer pool, with its timeout. Raises ApiError."""
        return await self.tokenizer_pool.run(
            Piece(partial(self.prompt_ids, prompt, images, must_fit=must_fit), size_of(prompt))
        )

    async def tokenize_all(self, prompts: Sequence[Prompt], images: Sequence[Sequence[Decoded]]) -> list[list[int]]:
        """Tokenize the prompts of one request. Raises ApiError, after which no further prompt is started."""
        every = zip(prompts, images, strict=True)
        pieces = [Piece(partial(self.prompt_ids, prompt, own), size_of(prompt)) for prompt, own in every]
        return await self.tokenizer_pool.run_all(pieces)

    async def render_end(self, prompt: ChatPrompt) -> str:
        """Return the end of a rendered chat, right before the answer. Raises ApiError."""
        return await self.tokenizer_pool.run(Piece(lambda: self._rendered(prompt)[-_PROMPT_END:], size_of(prompt)))

    async def decode(self, ids: list[int], *, skip_special_tokens: bool, param: str | None = None) -> str:
        """Decode token ids in the tokenizer pool. Raises ApiError, naming `param` for invalid ids."""
        work = partial(self.tokenizer.decode, ids, skip_special_tokens=skip_special_tokens, param=param)
        return await self.tokenizer_pool.run(Piece(work, len(ids)))

    async def spell(self, ids: list[int]) -> list[str]:
        """Return the vocabulary's spelling of each id, in the tokenizer pool. Raises ApiError."""
        return await self.tokenizer_pool.run(Piece(lambda: list(map(self.tokenizer.token, ids)), len(ids)))

    def prompt_ids(self, prompt: Prompt, images: Sequence[Decoded] = (), *, must_fit: bool = True) -> list[int]:
        """Render and tokenize a prompt with its images. CPU-bound: not for the event loop. Raises BadRequestError.

        A text that is certainly longer than the context is refused before tokenization; without `must_fit`, one with
        more characters than may be counted.
        """
        match prompt:
            case ChatPrompt():
                text = self._with_placeholders(self._rendered(prompt), prompt, images)
                self.check_length(text, prompt.param, must_fit=must_fit)
                return self.tokenizer.encode(text, add_special_tokens=False)
            case TextPrompt():
                text = self._with_placeholders(prompt.text, prompt, images)
                self.check_length(text, prompt.param, must_fit=must_fit)
                return self.tokenizer.encode(text, add_special_tokens=prompt.add_special_tokens)
            case TokenPrompt():
                if must_fit and len(prompt.token_ids) > self.longest_prompt:
                    raise self._too_long(prompt.param, f"{len(prompt.token_ids)} tokens", len(prompt.token_ids))
                for token_id in prompt.token_ids:
                    if not 0 <= token_id < self.limits.vocab_size:
                        raise BadRequestError(f"{token_id} is not a token id of this model.", param=prompt.param)
                return prompt.token_ids

    def check_audio(self, *, given: bool) -> None:
        """Raise BadRequestError for a request with audio if the model takes none, and for one without if it does."""
        if given and self.limits.audio is None:
            raise BadRequestError(f"The model {self.name!r} takes no audio.", param="model")
        if not given and self.limits.audio is not None:
            message = f"The model {self.name!r} turns audio into text, and answers /v1/audio/transcriptions only."
            raise BadRequestError(message, param="model")

    def _rendered(self, prompt: ChatPrompt) -> str:
        self.check_audio(given=False)
        template = self.files.template
        if template is None:
            raise BadRequestError(
                f"The model {self.name!r} has no chat template, so it answers /v1/completions only.",
                param=prompt.param,
            )
        try:
            return template.render(prompt, self.tokenizer.escape_special)
        except BadRequestError as error:
            param = prompt.param if error.param == "messages" else error.param
            raise BadRequestError(self.tokenizer.unescape(error.message), param=param) from error

    def _with_placeholders(self, text: str, prompt: ChatPrompt | TextPrompt, images: Sequence[Decoded]) -> str:
        """Put placeholder tokens into a text or a rendered chat, in the place of its images."""
        for marker, texts in replacements_of(images, self.limits).items():
            replaced = self.tokenizer.replace_control(text, marker, texts)
            if replaced is None:
                nouns = "images" if self.limits.sounds is None else "audio clips"
                raise BadRequestError(
                    "The model's chat template takes no images, videos or audio here."
                    if isinstance(prompt, ChatPrompt)
                    else f"The text must have {marker!r} for each of its {len(texts)} {nouns}, and nowhere else.",
                    param=prompt.images[0].param,
                )
            text = replaced
        return text

    def check_length(self, text: str, param: str, *, must_fit: bool = True) -> None:
        """Refuse a text that is too long before it is tokenized. Raises BadRequestError."""
        most = max(_COUNTED_CHARS, _COUNTED_CHARS_A_TOKEN * self.longest_prompt)
        if not must_fit and len(text) > most:
            raise BadRequestError(
                f"The text has {len(text)} characters. At most {most} are counted for this model.",
                param=param,
                code="string_above_max_length",
            )
        if must_fit and (fewest := self.tokenizer.fewest_tokens(text)) > self.longest_prompt:
            raise self._too_long(
                param, f"{len(self.tokenizer.unescape(text))} characters, which are at least {fewest} tokens", fewest
            )

    def _too_long(self, param: str, length: str, tokens: int) -> ContextLengthExceededError:
        kind, most = "context" if self.limits.encoder is None else "prompt", self.longest_prompt
        return ContextLengthExceededError(
            f"This model's maximum {kind} length is {most} tokens. However, your prompt has {length}.",
            param=param,
            prompt=tokens,
            context=most,
        )


def _fingerprint(*made_of: object) -> str:
    return f"fp_{hashlib.sha256(repr(made_of).encode()).hexdigest()[:12]}"


def context_of(limits: ModelLimits) -> int:
    """Return the maximum number of prompt and output tokens of a request."""
    return min(limits.context_length, limits.max_total_tokens)


def _defaults(config: Mapping[str, Any]) -> SamplingDefaults:
    """Read sampling defaults, ignoring values that are not numbers. Raises ValueError for values out of range."""
    known = {
        name: config[name]
        for name in SamplingDefaults.__struct_fields__
        if isinstance(config.get(name), int | float) and not isinstance(config[name], bool)
    }
    try:
        return msgspec.convert(known, SamplingDefaults)
    except msgspec.ValidationError as error:
        raise ValueError(f"generation_config.json: {error_line(error)}") from error
