"""Grammar backend xgrammar, an optional extra. Its masks come from automata compiled for the vocabulary."""

import re
from collections.abc import Sequence
from importlib.metadata import version
from typing import Self

import numpy as np
from llguidance import LLTokenizer
from xgrammar import GrammarCompiler, GrammarMatcher, TokenizerInfo, VocabType

from tercet.protocol.messages.values import Grammar
from tercet.scheduler.grammar.port import GrammarError, Masks
from tercet.scheduler.grammar.xgrammar_texts import rules_of

_NO_TEXT = b"\xff"
"""Prefix of an added token's name. No text contains this byte, so a grammar can name the token only by its id."""

_PLACE = re.compile(r"^\[[\d:]+\] \S+:\d+: ")
"""Time and source line at the start of xgrammar's errors."""


class XGrammarMatcher:
    """`Matcher` over a GrammarMatcher."""

    def __init__(self, native: GrammarMatcher, error: str = "") -> None:
        self.native = native
        self._error = error

    @property
    def error(self) -> str:
        return self._error

    @property
    def accepting(self) -> bool:
        return bool(self.native.is_completed())

    @property
    def finished(self) -> bool:
        """Return whether the output has ended.

        A matcher after which only an end can follow is found as a mask is filled.
        """
        return bool(self.native.is_terminated())

    def advance(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            if self._error:
                return
            if not self.native.accept_token(token):
                self._error = f"token {token} does not fit"

    def forced(self) -> list[int]:
        """Return no tokens: if only one text can follow, the masks allow every tokenization, and the model chooses."""
        return []

    def copy(self) -> Self:
        return type(self)(self.native.fork(), self._error)


class XGrammarBackend:
    """`GrammarBackend` over xgrammar. `tokenizer` is the text of a tokenizer.json, which llguidance splits into tokens.

    Raises ValueError for a tokenizer it cannot read, or one larger than the model's vocabulary.
    """

    def __init__(self, tokenizer: str, vocab_size: int, end_ids: Sequence[int]) -> None:
        read = LLTokenizer(tokenizer, n_vocab=vocab_size, eos_token=list(end_ids) or None)
        self._end_ids = list(read.eos_tokens)
        names = {read.decode_bytes([token]): token for token in range(vocab_size) if read.is_special_token(token)}
        texts = [b"" if read.is_special_token(token) else read.decode_bytes([token]) for token in range(vocab_size)]
        for name, token in names.items():
            if name != f"<[{token}]>".encode():  # the placeholder of ids without a token
                texts[token] = _NO_TEXT + name
        self._named = {name.decode(errors="replace"): token for name, token in names.items()}
        self._tokens = TokenizerInfo(texts, VocabType.RAW, vocab_size=vocab_size, stop_token_ids=self._end_ids)
        self._compiler = GrammarCompiler(self._tokens, cache_enabled=False)
        said = np.array([bool(text) for text in texts] + [False] * (-vocab_size % 32))
        self._said = np.packbits(said, bitorder="little").view(np.int32)

    @property
    def name(self) -> str:
        return f"xgrammar {version('xgrammar')}"

    @property
    def end_ids(self) -> Sequence[int]:
        """End ids of the model, or of the tokenizer if the model names none."""
        return self._end_ids

    def compile(self, grammar: Grammar) -> XGrammarMatcher:
        try:
            rules = rules_of(grammar, self._tokens, self._named, self._end_ids)
            return XGrammarMatcher(GrammarMatcher(self._compiler.compile_grammar(rules)))
        except GrammarError:
            raise
        except (RuntimeError, ValueError) as error:
            raise GrammarError(_PLACE.sub("", str(error))) from error

    def fill(self, matchers: Sequence[XGrammarMatcher], masks: Masks) -> None:
        """Write the masks. The mask of an ended matcher is empty."""
        masks[: len(matchers)] = 0
        for row, each in enumerate(matchers):
            if not each.error and not each.finished:
                each.native.fill_next_token_bitmask(masks, row)
        masks &= self._said  # xgrammar's "any token but" includes ids without a token
