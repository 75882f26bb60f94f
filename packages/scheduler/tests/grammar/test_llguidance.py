"""The llguidance adapter over a tokenizer of its own: what it allows, forces, ends and refuses."""

import json
from pathlib import Path

import numpy as np
import pytest

from tercet.protocol.grammar_limits import PARSER_LIMITS
from tercet.protocol.messages.values import Grammar, GrammarKind
from tercet.scheduler.grammar.llguidance import LLGuidanceBackend, LLGuidanceMatcher
from tercet.scheduler.grammar.port import GrammarError
from tercet.scheduler.model_files import resolve_model

VOCAB = 3072
END = 3


@pytest.fixture(scope="module")
def tokenizer_text() -> str:
    return (Path(resolve_model("embedded")) / "tokenizer.json").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def backend(tokenizer_text: str) -> LLGuidanceBackend:
    return LLGuidanceBackend(tokenizer_text, VOCAB, [END, 0])


@pytest.fixture(scope="module")
def ids(tokenizer_text: str) -> "Ids":
    return Ids(tokenizer_text)


class Ids:
    def __init__(self, text: str) -> None:
        from tokenizers import Tokenizer

        self._tokenizer = Tokenizer.from_str(text)

    def __call__(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def text(self, ids: list[int]) -> str:
        text: str = self._tokenizer.decode(ids)
        return text


def allowed(backend: LLGuidanceBackend, *matchers: LLGuidanceMatcher) -> list[set[int]]:
    masks = np.zeros((len(matchers), VOCAB // 32), dtype=np.int32)
    backend.fill(matchers, masks)
    bits = np.unpackbits(masks.view(np.uint8), axis=1, bitorder="little")
    return [set(row.nonzero()[0].tolist()) for row in bits]


def regex(pattern: str) -> Grammar:
    return Grammar(GrammarKind.REGEX, pattern)


def test_only_what_fits_is_allowed_and_ends_only_where_it_accepts(backend: LLGuidanceBackend, ids: Ids) -> None:
    matcher = backend.compile(regex("[0-9]{2}x?"))
    digits = {token for token in range(VOCAB) if ids.text([token]).isdigit() and len(ids.text([token])) <= 2}
    first = allowed(backend, matcher)[0]
    assert {ids("7")[0], ids("3")[0]} <= first <= digits | {token for token in first if ids.text([token])[-1] == "x"}
    assert not matcher.accepting
    matcher.advance([*ids("7"), *ids("3")])
    assert matcher.accepting
    assert not matcher.finished
    assert allowed(backend, matcher) == [{END, 0, ids("x")[0]}]
    matcher.advance(ids("x"))
    assert matcher.accepting
    assert matcher.finished
    assert allowed(backend, matcher) == [{END, 0}]


def test_many_masks_at_once_are_those_of_each_alone(backend: LLGuidanceBackend, ids: Ids) -> None:
    matchers = []
    for length in range(24):
        matchers.append(backend.compile(regex("(ab|cd|[e-z]){0,30}!")))
        matchers[-1].advance(ids("ab" * length)[:length])
    together = allowed(backend, *matchers)
    assert together == [allowed(backend, matcher)[0] for matcher in matchers]
    assert len({frozenset(mask) for mask in together}) > 1


def test_where_there_is_no_choice_the_tokens_are_those_of_the_tokenizer(backend: LLGuidanceBackend, ids: Ids) -> None:
    matcher = backend.compile(regex("The result is: [0-9]"))
    whole = ids("The result is:")
    forced = matcher.forced()
    assert forced == whole[: len(forced)]
    assert len(forced) >= len(whole) - 1  # the last may merge with what follows
    for token in forced:  # a mask agrees, so that an output is the same one token at a time
        assert allowed(backend, matcher) == [{token}]
        matcher.advance([token])
    assert matcher.forced() == []


def test_copies_go_their_own_ways(backend: LLGuidanceBackend, ids: Ids) -> None:
    matcher = backend.compile(regex("(yes|no)!"))
    before = allowed(backend, matcher)
    other = matcher.copy()
    other.advance(ids("no"))
    assert allowed(backend, matcher) == before
    other.advance(ids("no"))
    assert other.error
    assert not matcher.error
    matcher.advance(ids("yes!"))
    assert matcher.finished


@pytest.mark.parametrize(
    "grammar",
    [
        regex("(open"),
        Grammar(GrammarKind.JSON_SCHEMA, "{"),
        Grammar(GrammarKind.JSON_SCHEMA, '{"type": "nothing"}'),
        Grammar(GrammarKind.JSON_SCHEMA, '{"not": {"type": "string"}}'),
        Grammar(GrammarKind.LARK, "start: missing"),
        Grammar(GrammarKind.LARK, ""),
    ],
    ids=str,
)
def test_what_cannot_be_read_is_refused(backend: LLGuidanceBackend, grammar: Grammar) -> None:
    with pytest.raises(GrammarError, match=r"."):
        backend.compile(grammar)


def test_a_lark_text_may_be_several_grammars_as_json(backend: LLGuidanceBackend, ids: Ids) -> None:
    grammars = [
        {"name": "outer", "lark_grammar": 'start: "[" @inner "]"'},
        {"name": "inner", "json_schema": {"const": 5}},
    ]
    matcher = backend.compile(Grammar(GrammarKind.LARK, json.dumps({"grammars": grammars})))
    matcher.advance(ids("[5]"))
    assert matcher.finished
    assert not matcher.error


def test_tokenizers_that_do_not_fit_the_model_are_refused(tokenizer_text: str) -> None:
    with pytest.raises(ValueError, match="vocab"):
        LLGuidanceBackend(tokenizer_text, VOCAB - 1, [END])
    with pytest.raises(ValueError, match="tokenizer"):
        LLGuidanceBackend("{}", VOCAB, [END])


def test_a_model_with_more_ids_than_its_tokenizer_never_says_them(tokenizer_text: str) -> None:
    wide = LLGuidanceBackend(tokenizer_text, VOCAB + 100, [END])
    masks = np.full((1, -(-(VOCAB + 100) // 32)), -1, dtype=np.int32)
    wide.fill([wide.compile(regex("(?s).*"))], masks)
    bits = np.unpackbits(masks.view(np.uint8), axis=1, bitorder="little")[0]
    assert bits[:VOCAB].any()
    assert not bits[VOCAB:].any()


@pytest.mark.parametrize(
    ("kind", "grammar", "text"),
    [
        (GrammarKind.REGEX, r"<\|im_end\|>/x", "<|im_end|>/x"),
        (GrammarKind.JSON_SCHEMA, '{"enum": ["a<|im_start|>"]}', '"a<|im_start|>"'),
        (GrammarKind.LARK, 'start: "<|begin|>" "b"', "<|begin|>b"),
        (GrammarKind.LARK, '{"grammars": [{"lark_grammar": "start: \\"<|im_end|>\\""}]}', "<|im_end|>"),
    ],
)
def test_text_that_reads_like_a_special_token_is_written_as_text(
    tokenizer_text: str, backend: LLGuidanceBackend, kind: GrammarKind, grammar: str, text: str
) -> None:
    from tokenizers import Tokenizer

    spelt = Tokenizer.from_str(tokenizer_text)
    spelt.encode_special_tokens = True
    matcher = backend.compile(Grammar(kind, grammar))
    for token in spelt.encode(text, add_special_tokens=False).ids:
        assert matcher.forced() == []
        assert token in allowed(backend, matcher)[0]
        matcher.advance([token])
    assert not matcher.error
    assert matcher.accepting


def test_a_special_token_in_what_is_no_grammar_is_a_refusal(backend: LLGuidanceBackend) -> None:
    for text in ('{"grammars": "<|im_end|>"}', '{"<|im_end|>": 1}', '{"<|im_end|>'):
        with pytest.raises(GrammarError):
            backend.compile(Grammar(GrammarKind.LARK, text))


def test_the_work_for_a_token_is_bounded(tokenizer_text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    grammar = Grammar(GrammarKind.LARK, "start: s\ns: s s | s s s | A\nA: /[a-z ]/")
    for most, bounded in ((PARSER_LIMITS["step_max_items"], False), (20, True)):
        monkeypatch.setitem(PARSER_LIMITS, "step_max_items", most)
        backend = LLGuidanceBackend(tokenizer_text, VOCAB, [END])
        matcher = backend.compile(grammar)
        allowed(backend, matcher)
        assert ("Too many items" in matcher.error) is bounded
