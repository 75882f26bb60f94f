"""Matcher of texts, and the tokens of the tiny model."""

import pytest
from tokenizers import Tokenizer

from packages.frontend.tests.structured_output.matching import TextMatcher
from tercet.frontend.constraints import Tokens


@pytest.fixture(scope="session")
def tokens(tokenizer: Tokenizer) -> Tokens:
    added = {token.content: token_id for token_id, token in tokenizer.get_added_tokens_decoder().items()}
    return Tokens(added=added, eos=[added["<|im_end|>"]])


@pytest.fixture(scope="session")
def matcher(tokenizer: Tokenizer, tokens: Tokens) -> TextMatcher:
    return TextMatcher(tokenizer, tokens.eos[0])
