"""A budget of reasoning tokens is exact where the end marker is several tokens, and changes no thought before it."""

import random
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from tercet.protocol.messages.values import Grammar, GrammarKind, ThinkingBudget
from tercet.scheduler.grammar.llguidance import LLGuidanceBackend, LLGuidanceMatcher
from tercet.scheduler.model_files import resolve_model

VOCAB, END = 3072, 3
MARKER = "</reason>"
FREE = f"start: <[^0,{END}]>*\n"


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_str((Path(resolve_model("embedded")) / "tokenizer.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def backend() -> LLGuidanceBackend:
    text = (Path(resolve_model("embedded")) / "tokenizer.json").read_text(encoding="utf-8")
    return LLGuidanceBackend(text, VOCAB, [END, 0])


def allowed(backend: LLGuidanceBackend, matcher: LLGuidanceMatcher) -> set[int]:
    masks = np.zeros((1, VOCAB // 32), dtype=np.int32)
    backend.fill([matcher], masks)
    return set(np.unpackbits(masks.view(np.uint8), bitorder="little").nonzero()[0].tolist())


def budget(tokens: int, begin: str = "") -> Grammar:
    return Grammar(GrammarKind.LARK, FREE, ThinkingBudget(tokens, MARKER, begin))


def write(backend: LLGuidanceBackend, grammar: Grammar, wanted: list[int], most: int = 60) -> list[int]:
    """Write the wanted tokens where they are allowed, otherwise the first allowed one."""
    matcher, written = backend.compile(grammar), list[int]()
    for token in wanted[:most]:
        may = allowed(backend, matcher)
        written.append(token if token in may else min(may))
        copied = matcher.copy()
        matcher.advance(written[-1:])
        assert not matcher.error
        copied.advance(written[-1:])
        assert allowed(backend, copied) == allowed(backend, matcher)
    return written


@pytest.mark.parametrize("tokens", [0, 1, 5])
@pytest.mark.parametrize("seed", range(4))
def test_any_thoughts_are_kept_up_to_the_budget(
    backend: LLGuidanceBackend, tokenizer: Tokenizer, tokens: int, seed: int
) -> None:
    special = set(tokenizer.get_added_tokens_decoder())
    pool = [token for token in range(300, tokenizer.get_vocab_size()) if token not in special]
    wanted = [
        token
        for token in random.Random(seed).sample(pool, 60)
        if not MARKER.startswith(tokenizer.decode([token])[-1:] or "?")
    ]
    written = write(backend, budget(tokens), wanted)
    marker = tokenizer.encode(MARKER, add_special_tokens=False).ids
    assert len(marker) > 1
    assert written[:tokens] == wanted[:tokens]
    assert tokenizer.decode(written[tokens : tokens + len(marker)]) == MARKER
    after = tokens + len(marker)
    assert written[after:] == wanted[after : len(written)]


def test_reasoning_that_ends_by_itself_leaves_the_answer_free(backend: LLGuidanceBackend, tokenizer: Tokenizer) -> None:
    wanted = tokenizer.encode(f"Hm.{MARKER}So it is, and nothing is counted any more.", add_special_tokens=False).ids
    assert write(backend, budget(20), wanted) == wanted


def test_a_begun_marker_may_be_a_thought_or_the_end(backend: LLGuidanceBackend, tokenizer: Tokenizer) -> None:
    begun = tokenizer.encode("</", add_special_tokens=False).ids
    matcher = backend.compile(budget(len(begun)))
    matcher.advance(begun)
    nexts = {tokenizer.decode([token]) for token in allowed(backend, matcher)}
    assert len(nexts) == 2
    assert all(MARKER.startswith(text) or MARKER[2:].startswith(text) for text in nexts)


def test_counting_begins_with_the_begin_marker(backend: LLGuidanceBackend, tokenizer: Tokenizer) -> None:
    text = "<reason>one two three four five six"
    wanted = tokenizer.encode(text, add_special_tokens=False).ids
    assert write(backend, budget(50, "<reason>"), wanted) == wanted
    cut = tokenizer.decode(write(backend, budget(2, "<reason>"), wanted * 2))
    assert MARKER in cut
    assert cut.index(MARKER) < len(text)
    plain = tokenizer.encode("No reasoning, just an answer.", add_special_tokens=False).ids
    assert write(backend, budget(2, "<reason>"), plain) == plain


def test_an_end_token_ends_no_reasoning(backend: LLGuidanceBackend, tokenizer: Tokenizer) -> None:
    matcher = backend.compile(budget(9))
    assert not matcher.accepting
    assert END not in allowed(backend, matcher)
    matcher.advance(tokenizer.encode(MARKER, add_special_tokens=False).ids)
    assert matcher.accepting
    assert END in allowed(backend, matcher)
