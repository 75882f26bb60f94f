"""Byte-level vocabulary with the markers of every notation as tokens, and a grammar matcher for it."""

import random
import re
from functools import cache

from llguidance import LLMatcher, LLTokenizer
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from tercet.frontend.constraints import Tokens
from tercet.frontend.structured_output.worker import source
from tercet.protocol.messages.values import Grammar

SPECIAL = re.findall(
    r"\S+",
    """<|endoftext|> <|im_end|> [TOOL_CALLS] [ARGS] [THINK] [/THINK] <｜tool▁calls▁begin｜> <｜tool▁calls▁end｜>
    <｜tool▁call▁begin｜> <｜tool▁call▁end｜> <｜tool▁sep｜> <|tool_calls_section_begin|> <|tool_calls_section_end|>
    <|tool_call_begin|> <|tool_call_end|> <|tool_call_argument_begin|> <|channel|> <|message|> <|start|> <|end|>
    <|call|> <|constrain|> <|return|> <|python_tag|> <|START_ACTION|> <|END_ACTION|> <|tool_call> <tool_call|> <|"|>
    <|tool_call_start|> <|tool_call_end|> <|tools_prefix|> <|tools_suffix|> <|tool_call|> <|/tool_call|>""",
)
ADDED = re.findall(r"\S+", "<tool_call> </tool_call> <think> </think> <arg_key> </arg_key> <arg_value> </arg_value>")
ENDS = ["<|im_end|>", "<|return|>", "<|call|>"]
WORDS = ["hello world the city of Oslo days 3 true false null name arguments parameters get_weather unit"] * 3


@cache
def tokenizer() -> Tokenizer:
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(WORDS, trainers.BpeTrainer(vocab_size=330, initial_alphabet=alphabet, show_progress=False))
    made.add_special_tokens([AddedToken(text, normalized=False) for text in SPECIAL])
    made.add_tokens([AddedToken(text, normalized=False) for text in ADDED])
    return made


@cache
def tokens() -> Tokens:
    added = {token.content: token_id for token_id, token in tokenizer().get_added_tokens_decoder().items()}
    return Tokens(added=added, eos=[added[text] for text in ENDS])


@cache
def _reader() -> LLTokenizer:
    size = tokenizer().get_vocab_size(with_added_tokens=True)
    return LLTokenizer(tokenizer().to_str(), n_vocab=size, eos_token=tokens().eos)


def matcher(grammar: Grammar) -> LLMatcher:
    made = LLMatcher(_reader(), source(grammar), log_level=0)
    assert not made.is_error(), made.get_error()
    return made


def accepts(grammar: Grammar, text: str) -> bool:
    """Return whether the tokenized text satisfies the whole grammar."""
    made, ids = matcher(grammar), tokenizer().encode(text, add_special_tokens=False).ids
    return bool(made.try_consume_tokens(ids) == len(ids) and made.is_accepting())


def sample_answer(grammar: Grammar, seed: int, most: int = 400) -> str | None:
    """Sample allowed tokens until the grammar may end; None if it never may."""
    made, chance = matcher(grammar), random.Random(seed)
    said: list[int] = []
    size = tokenizer().get_vocab_size(with_added_tokens=True)
    for _ in range(most):
        if made.is_accepting():
            return tokenizer().decode(said, skip_special_tokens=False)
        mask = made.compute_bitmask()
        allowed = [token for token in range(size) if mask[token // 8] >> token % 8 & 1]
        said.append(chance.choice(allowed))
        assert made.consume_token(said[-1])
    return None
