"""Texts that a grammar accepts, according to llguidance with a tiny model's tokenizer."""

from llguidance import LLMatcher, LLTokenizer
from tokenizers import Tokenizer

from tercet.frontend.structured_output.worker import source
from tercet.protocol.messages.values import Grammar


class TextMatcher:
    """Matcher that tokenizes texts as models write them: added tokens are single ids."""

    def __init__(self, tokenizer: Tokenizer, eos: int) -> None:
        self._tokenizer = tokenizer
        self._native = LLTokenizer(tokenizer.to_str(), n_vocab=tokenizer.get_vocab_size(), eos_token=eos)

    def accepts(self, grammar: Grammar, text: str) -> bool:
        """Return whether a text is an instance of the grammar."""
        matcher = self._after(grammar, text)
        return matcher is not None and matcher.is_accepting()

    def accepts_prefix(self, grammar: Grammar, text: str) -> bool:
        """Return whether an instance may begin with a text."""
        return self._after(grammar, text) is not None

    def forced(self, grammar: Grammar, text: str) -> str:
        """Return the text that must follow."""
        matcher = self._after(grammar, text)
        assert matcher is not None
        return self._tokenizer.decode(matcher.compute_ff_tokens(), skip_special_tokens=False)

    def _after(self, grammar: Grammar, text: str) -> LLMatcher | None:
        matcher = LLMatcher(self._native, source(grammar), log_level=0)
        assert not matcher.is_error(), matcher.get_error()
        ids = self._tokenizer.encode(text).ids
        return matcher if matcher.try_consume_tokens(ids) == len(ids) else None
