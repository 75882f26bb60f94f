"""Trial of a grammar: costs that it refuses and accepts."""

import pytest
from llguidance import LLTokenizer

from tercet.frontend.structured_output.limits import MAX_TAGS
from tercet.frontend.structured_output.worker import grammar_error
from tercet.protocol.grammar_limits import MOST_FORCED
from tercet.protocol.messages.values import Grammar, GrammarKind, ModelLimits

AMBIGUOUS = {
    "two and three": "start: s\ns: s s | s s s | A\nA: /[a-z ]/",
    "nullable": "start: s\ns: a s a s a | \na: A?\nA: /[a-z ]/",
    "by chance later": 'start: "x"{9} s\ns: s s | s s s | A\nA: /[a-z ]/',
}
USUAL = {
    "sums": 'start: e\ne: e "+" e | e "*" e | "(" e ")" | N\nN: /[0-9]+/',
    "words": 'start: w (" " w)* "."\nw: C+\nC: /[a-z]/',
    "lists": 'start: "[" (v ("," v)*)? "]"\nv: start | /[0-9]{1,9}/',
    "object": 'start: %json {"type": "object"}',
}


@pytest.fixture(scope="module")
def vocabulary(files: dict[str, bytes], limits: ModelLimits) -> LLTokenizer:
    return LLTokenizer(
        files["tokenizer.json"].decode(), n_vocab=limits.vocab_size, eos_token=list(limits.eos_token_ids) or None
    )


def lark(text: str) -> Grammar:
    return Grammar(GrammarKind.LARK, text)


@pytest.mark.parametrize("name", AMBIGUOUS)
def test_what_costs_more_with_every_token_is_refused(name: str, vocabulary: LLTokenizer) -> None:
    found = grammar_error(lark(AMBIGUOUS[name]), vocabulary)
    assert "Too many items" in found or "takes too long" in found


@pytest.mark.parametrize("name", USUAL)
def test_usual_grammars_pass(name: str, vocabulary: LLTokenizer) -> None:
    assert grammar_error(lark(USUAL[name]), vocabulary) == ""


def test_as_many_tags_as_there_may_be_pass(vocabulary: LLTokenizer) -> None:
    tags = " | ".join(f'"<tool{index}>" %json {{"type": "object"}} "</tool{index}>"' for index in range(MAX_TAGS // 4))
    assert grammar_error(lark(f"start: (t FREE)*\nFREE: /[^<]*/\nt: {tags}"), vocabulary) == ""


@pytest.mark.parametrize(("length", "refused"), [(MOST_FORCED // 2, False), (MOST_FORCED + 100, True)])
def test_what_forces_too_long_a_text_is_refused(length: int, refused: bool, vocabulary: LLTokenizer) -> None:
    found = grammar_error(lark(f'start: ("a" | "b") "{"lorem " * (length // 6)}"'), vocabulary)
    assert ("leaves no choice" in found) is refused
