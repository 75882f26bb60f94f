"""Grammar backend llguidance, which computes masks lazily with an Earley parser over derivatives of regexes."""

import re
from collections.abc import Sequence
from typing import Any, Self

import msgspec
import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, __version__

from tercet.protocol.grammar_limits import PARSER_LIMITS
from tercet.protocol.messages.values import Grammar, GrammarKind
from tercet.scheduler.grammar.port import GrammarError, Masks
from tercet.scheduler.grammar.thinking import ThinkingCounter

_SILENT = 0
_UNFORCED = '%llguidance {"no_forcing": true}\n'


class _AddedToken(msgspec.Struct):
    content: str
    special: bool = False


class _Tokenizer(msgspec.Struct):
    """The fields of a tokenizer.json that are read here."""

    added_tokens: list[_AddedToken] = []


class LLGuidanceMatcher:
    """`Matcher` over an LLMatcher, and a budget of reasoning tokens beside it."""

    def __init__(self, native: LLMatcher, counter: ThinkingCounter | None = None) -> None:
        self.native = native
        self.counter = counter

    @property
    def error(self) -> str:
        return str(self.native.get_error())

    @property
    def accepting(self) -> bool:
        return bool(self.native.is_accepting()) and not self._thinks

    @property
    def finished(self) -> bool:
        return bool(self.native.is_stopped())

    def advance(self, tokens: Sequence[int]) -> None:
        self.native.consume_tokens(list(tokens))
        if self.counter is not None:
            self.counter.read(tokens)

    def forced(self) -> list[int]:
        return [] if self._thinks else list(self.native.compute_ff_tokens())

    def copy(self) -> Self:
        return type(self)(self.native.deep_copy(), self.counter.copy() if self.counter is not None else None)

    @property
    def _thinks(self) -> bool:
        return self.counter is not None and self.counter.thinking


class LLGuidanceBackend:
    """`GrammarBackend` over llguidance. `tokenizer` is the text of a tokenizer.json.

    Raises ValueError for a tokenizer it cannot read, or one larger than the model's vocabulary.
    """

    def __init__(self, tokenizer: str, vocab_size: int, end_ids: Sequence[int]) -> None:
        self._tokenizer = LLTokenizer(tokenizer, n_vocab=vocab_size, eos_token=list(end_ids) or None)
        self._limits = LLParserLimits(**PARSER_LIMITS)
        ends = [token for token in self._tokenizer.eos_tokens if token < vocab_size]
        text_ends = [token for token in ends if not self._tokenizer.is_special_token(token)]
        words = (vocab_size + 31) // 32
        self._ends = _mask(ends, words)
        self._text_ends = _mask(text_ends, words) if text_ends else None
        added = msgspec.json.decode(tokenizer, type=_Tokenizer).added_tokens
        specials = [re.escape(each.content) for each in added if each.special and each.content]
        self._specials = re.compile("|".join(specials)) if specials else None

    @property
    def name(self) -> str:
        return f"llguidance {__version__}"

    @property
    def end_ids(self) -> Sequence[int]:
        """End ids of the model, or of the tokenizer if the model names none."""
        return list(self._tokenizer.eos_tokens)

    def compile(self, grammar: Grammar) -> LLGuidanceMatcher:
        """Return a matcher at the beginning of an output. Releases the GIL meanwhile."""
        source = _source(grammar)
        named = self._specials and self._specials.search(grammar.text.replace("\\", ""))
        if named or self._text_ends is not None:  # the only token of a forced text may be an end token
            source = _unforced(source)
        native = LLMatcher(self._tokenizer, source, log_level=_SILENT, limits=self._limits)
        counter = ThinkingCounter(grammar.thinking, self._tokenizer) if grammar.thinking is not None else None
        matcher = LLGuidanceMatcher(native, counter)
        if matcher.error:
            raise GrammarError(matcher.error)
        return matcher

    def fill(self, matchers: Sequence[LLGuidanceMatcher], masks: Masks) -> None:
        """Write the masks. An end token that llguidance allows as text is removed: it would end the output there."""
        size = 4 * masks.shape[1]
        for row, matcher in enumerate(matchers):
            matcher.native.unsafe_compute_mask_ptr(masks.ctypes.data + row * size, size)
            if self._text_ends is not None and not matcher.accepting:
                masks[row] &= ~self._text_ends
            if matcher.counter is not None and matcher.counter.thinking:
                masks[row] &= ~self._ends
                if allowed := matcher.counter.allowed():
                    masks[row] &= _mask(allowed, masks.shape[1])


def _mask(tokens: Sequence[int], words: int) -> Masks:
    """Return the row of a mask that allows these tokens."""
    marked = np.zeros(words * 32, dtype=bool)
    marked[[*tokens]] = True
    return np.packbits(marked, bitorder="little").view(np.int32)


def _source(grammar: Grammar) -> str:
    """Return the grammar in llguidance's notation. A Lark text may also be in its JSON form, which holds several."""
    match grammar.kind:
        case GrammarKind.JSON_SCHEMA:
            try:
                return str(LLMatcher.grammar_from_json_schema(grammar.text))
            except ValueError as error:
                raise GrammarError(str(error)) from error
        case GrammarKind.REGEX:
            return str(LLMatcher.grammar_from_regex(grammar.text))
        case GrammarKind.LARK:
            return grammar.text


def _unforced(source: str) -> str:
    """Return the same grammar without forced tokens.

    llguidance tokenizes forced text with special tokens recognized in it, and then finds that they do not match the
    text.
    """
    try:
        form: Any = msgspec.json.decode(source) if source.startswith("{") else {"grammars": [{"lark_grammar": source}]}
        for each in form["grammars"]:
            schema = msgspec.json.encode(each.pop("json_schema", None)).decode()
            lark = each.get("lark_grammar") or f"start: %json {schema}"
            each["lark_grammar"] = lark if "%llguidance" in lark else _UNFORCED + lark
    except (msgspec.DecodeError, LookupError, TypeError, AttributeError) as error:
        raise GrammarError("it is no grammar in JSON") from error
    return msgspec.json.encode(form).decode()
