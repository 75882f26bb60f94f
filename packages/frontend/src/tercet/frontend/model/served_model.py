"""One model as a frontend sees it: the tokenizer and template it was fetched with, and the limits to check against."""

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
from tercet.frontend.model.chat_template import TemplateManager
from tercet.frontend.model.files import read_object, read_text, reading
from tercet.frontend.model.prompts import ChatPrompt, Prompt, TextPrompt, TokenPrompt, size_of
from tercet.frontend.model.sentence_files import SentenceFiles
from tercet.frontend.model.special_text import SpecialTexts
from tercet.frontend.model.token_bytes import TokenBytes
from tercet.frontend.model.tokenizer import PromptTokenizer
from tercet.frontend.model.tokenizer_pool import Piece, TokenizerPool
from tercet.protocol.json_files import error_line
from tercet.protocol.messages.values import LoRAAdapter, ModelIdentity, ModelLimits

_PROMPT_END = 256
"""Characters of a rendered chat that `rendered_end` gives."""
_COUNTED_CHARS = 1 << 20
_COUNTED_CHARS_A_TOKEN = 64
"""A text that is only counted may have so many characters in all, or for each token of the context: the larger."""


class SamplingDefaults(msgspec.Struct, frozen=True):
    """What a model's generation_config.json asks for where a request says nothing."""

    temperature: Annotated[float, msgspec.Meta(ge=0, le=100)] | None = None
    top_p: Annotated[float, msgspec.Meta(ge=0, le=1)] | None = None
    top_k: Annotated[int, msgspec.Meta(ge=-1, le=2**31 - 1)] | None = None
    min_p: Annotated[float, msgspec.Meta(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, msgspec.Meta(gt=0, le=10)] | None = None


class ModelFiles:
    """What is made of a model's tokenizer files. Raises ValueError for files that cannot be read."""

    def __init__(self, files: dict[str, bytes]) -> None:
        if "tokenizer.json" not in files:
            raise ValueError("the model has no tokenizer.json")
        self.tokenizer_json = files["tokenizer.json"]
        self.tokenizer_sha = hashlib.sha256(files["tokenizer.json"]).hexdigest()
        with reading("tokenizer.json"):
            self.tokenizer = PromptTokenizer(read_text(files, "tokenizer.json"))
            self.token_bytes = TokenBytes(self.tokenizer)
            self.special_texts = SpecialTexts(map(self.tokenizer.token, self.tokenizer.special_ids))
        with reading("the chat template"):
            self.template = TemplateManager.from_files(files)
        with reading("the files of sentence-transformers"):
            self.sentences = SentenceFiles(files)
        self.defaults = _defaults(read_object(files, "generation_config.json"))


class ServedModel:
    """A model that some scheduler is ready to run, or one with an adapter (`lora`) that is added to it."""

    def __init__(
        self,
        name: str,
        files: ModelFiles,
        limits: ModelLimits,
        identity: ModelIdentity,
        text_work: TokenizerPool | None = None,
        software: str = "",
    ) -> None:
        self.name = self.base = name
        self.lora: LoRAAdapter | None = None
        self.text_work = text_work or TokenizerPool()
        self.files = files
        self.limits = limits
        self.identity = identity
        self.software = software
        """What its schedulers run, or the first of them."""
        self.created = int(time.time())
        # The digest of the weights has their dtype and quantization in it.
        self.fingerprint = _fingerprint(__version__, software, identity.weights, sorted(identity.files.items()))

    def adapted(self, name: str, lora: LoRAAdapter, created: int) -> "ServedModel":
        """The same with an adapter, which clients know by that name; `base` is the name of the model without."""
        model = copy.copy(self)
        model.name, model.lora, model.created = name, lora, created
        model.fingerprint = _fingerprint(self.fingerprint, lora.sha256)
        return model

    @property
    def context(self) -> int:
        """Tokens of prompt and output that one request can have."""
        return context_of(self.limits)

    @cached_property
    def tokens(self) -> Tokens:
        """What grammars must know of its vocabulary."""
        added = {self.tokenizer.token(token_id): token_id for token_id in self.tokenizer.added_ids}
        return Tokens(added=added, eos=self.limits.eos_token_ids)

    @property
    def tokenizer(self) -> PromptTokenizer:
        """Encodes this model's prompts."""
        return self.files.tokenizer

    async def tokenized(self, prompt: Prompt, *, must_fit: bool = True) -> list[int]:
        """`prompt_ids`, off the event loop and with an end to the wait for it. Raises ApiError."""
        return await self.text_work.run(Piece(partial(self.prompt_ids, prompt, must_fit=must_fit), size_of(prompt)))

    async def all_tokenized(self, prompts: Sequence[Prompt]) -> list[list[int]]:
        """Return the ids of the prompts of one request. Raises ApiError, and then begins no more of them."""
        return await self.text_work.run_all([Piece(partial(self.prompt_ids, each), size_of(each)) for each in prompts])

    async def rendered_end(self, prompt: ChatPrompt) -> str:
        """The end of a chat as its template renders it, right before the answer. Raises ApiError."""
        return await self.text_work.run(Piece(lambda: self._rendered(prompt)[-_PROMPT_END:], size_of(prompt)))

    async def decoded(self, ids: list[int], *, skip_special_tokens: bool, param: str | None = None) -> str:
        """The text of any ids. Raises ApiError, naming `param` where the ids are at fault."""
        work = partial(self.tokenizer.decode, ids, skip_special_tokens=skip_special_tokens, param=param)
        return await self.text_work.run(Piece(work, len(ids)))

    def prompt_ids(self, prompt: Prompt, *, must_fit: bool = True) -> list[int]:
        """Render and tokenize. Long work for long prompts: called off the event loop. Raises BadRequestError.

        Before that work a text is refused that is certainly longer than the context or, without `must_fit`, that has
        more characters than are counted for anybody.
        """
        match prompt:
            case ChatPrompt():
                text = self._rendered(prompt)
                self.check_length(text, prompt.param, must_fit=must_fit)
                return self.tokenizer.encode(text, add_special_tokens=False)
            case TextPrompt():
                self.check_length(prompt.text, prompt.param, must_fit=must_fit)
                return self.tokenizer.encode(prompt.text, add_special_tokens=prompt.add_special_tokens)
            case TokenPrompt():
                if must_fit and len(prompt.token_ids) > self.context:
                    raise self._too_long(prompt.param, f"{len(prompt.token_ids)} tokens", len(prompt.token_ids))
                for token_id in prompt.token_ids:
                    if not 0 <= token_id < self.limits.vocab_size:
                        raise BadRequestError(f"{token_id} is not a token id of this model.", param=prompt.param)
                return prompt.token_ids

    def _rendered(self, prompt: ChatPrompt) -> str:
        template = self.files.template
        if template is None:
            raise BadRequestError(
                f"The model {self.name!r} has no chat template, so it answers /v1/completions only.",
                param=prompt.param,
            )
        try:
            return template.render(prompt, self.tokenizer.guard)
        except BadRequestError as error:
            param = prompt.param if error.param == "messages" else error.param
            raise BadRequestError(self.tokenizer.unguard(error.message), param=param) from error

    def check_length(self, text: str, param: str, *, must_fit: bool = True) -> None:
        """Refuse a text that is too long, before the work of tokenizing it. Raises BadRequestError."""
        most = max(_COUNTED_CHARS, _COUNTED_CHARS_A_TOKEN * self.context)
        if not must_fit and len(text) > most:
            raise BadRequestError(
                f"The text has {len(text)} characters. At most {most} are counted for this model.",
                param=param,
                code="string_above_max_length",
            )
        if must_fit and (fewest := self.tokenizer.fewest_tokens(text)) > self.context:
            raise self._too_long(
                param, f"{len(self.tokenizer.unguard(text))} characters, which are at least {fewest} tokens", fewest
            )

    def _too_long(self, param: str, length: str, tokens: int) -> ContextLengthExceededError:
        return ContextLengthExceededError(
            f"This model's maximum context length is {self.context} tokens. However, your prompt has {length}.",
            param=param,
            prompt=tokens,
            context=self.context,
        )


def _fingerprint(*made_of: object) -> str:
    return f"fp_{hashlib.sha256(repr(made_of).encode()).hexdigest()[:12]}"


def context_of(limits: ModelLimits) -> int:
    """Tokens of prompt and output that one request can have."""
    return min(limits.context_length, limits.max_total_tokens)


def _defaults(config: Mapping[str, Any]) -> SamplingDefaults:
    """Sampling defaults; values that are no numbers are passed over. Raises ValueError for what no request may say."""
    known = {
        name: config[name]
        for name in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
        if isinstance(config.get(name), int | float) and not isinstance(config[name], bool)
    }
    try:
        return msgspec.convert(known, SamplingDefaults)
    except msgspec.ValidationError as error:
        raise ValueError(f"generation_config.json: {error_line(error)}") from error
