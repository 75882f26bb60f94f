"""The xgrammar adapter: whatever is sampled under its masks is an instance, and llguidance would say so, too."""

import json
import random
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer

from tercet.protocol.messages.values import Grammar, GrammarKind
from tercet.scheduler.grammar.llguidance import LLGuidanceBackend
from tercet.scheduler.grammar.port import GrammarBackend, GrammarError, Matcher
from tercet.scheduler.model_files import resolve_model

pytest.importorskip("xgrammar", reason="xgrammar is an optional extra")
import jsonschema_rs

from tercet.scheduler.grammar.xgrammar import XGrammarBackend

VOCAB = 3072
END, PAD, CALL, CALL_ENDS = 3, 0, 3068, 3069

SPACE = {"whitespace_pattern": r" |\r?\n[ \t]{0,32}"}
"""What frontends write into every schema."""


@pytest.fixture(scope="module")
def tokenizer_text() -> str:
    return (Path(resolve_model("embedded")) / "tokenizer.json").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def backend(tokenizer_text: str) -> XGrammarBackend:
    return XGrammarBackend(tokenizer_text, VOCAB, [END])


@pytest.fixture(scope="module")
def other(tokenizer_text: str) -> LLGuidanceBackend:
    return LLGuidanceBackend(tokenizer_text, VOCAB, [END])


@pytest.fixture(scope="module")
def words(tokenizer_text: str) -> "Words":
    return Words(tokenizer_text)


class Words:
    """Tokens and what they are likely to be sampled for: what ends something often, what begins something seldom."""

    def __init__(self, text: str) -> None:
        self._tokenizer = Tokenizer.from_str(text)
        texts = [self.text([token]) for token in range(VOCAB)]
        self.weights = [20.0 if text in {'"', "}", "]"} else 2.0 if text.isalnum() else 0.2 for text in texts]

    def __call__(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def text(self, ids: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(list(ids), skip_special_tokens=False)
        return text


def allowed(backend: GrammarBackend[Any], *matchers: Matcher) -> list[set[int]]:
    masks = np.full((len(matchers), VOCAB // 32), -1, dtype=np.int32)
    backend.fill(matchers, masks)
    bits = np.unpackbits(masks.view(np.uint8), axis=1, bitorder="little")
    return [set(row.nonzero()[0].tolist()) for row in bits]


def sampled(backend: XGrammarBackend, grammar: Grammar, words: Words, seed: int, most: int = 120) -> list[int] | None:
    """An output by its masks alone; None if it was cut off."""
    chance = random.Random(seed)
    matcher, output = backend.compile(grammar), list[int]()
    while len(output) < most:
        mask = sorted(allowed(backend, matcher)[0])
        assert mask, f"nothing can follow {words.text(output)!r}"
        assert matcher.accepting == (END in mask)
        if END in mask and (len(mask) == 1 or chance.random() < 0.4):
            return output
        mask = [token for token in mask if token != END]
        output += chance.choices(mask, [words.weights[token] for token in mask])
        matcher.advance(output[-1:])
        assert not matcher.error
    return None


def instances(backend: XGrammarBackend, grammar: Grammar, words: Words) -> list[str]:
    """Several outputs that ended, of which there must be some."""
    outputs = (sampled(backend, grammar, words, seed) for seed in range(12))
    found = [words.text(each) for each in outputs if each is not None]
    assert found
    return found


def regex(pattern: str) -> Grammar:
    return Grammar(GrammarKind.REGEX, pattern)


def schema(value: object, **guidance: Any) -> Grammar:
    guided = {"x-guidance": {**SPACE, **guidance}, **value} if isinstance(value, dict) else value
    return Grammar(GrammarKind.JSON_SCHEMA, json.dumps(guided))


def lark(text: str) -> Grammar:
    return Grammar(GrammarKind.LARK, text)


def structure(properties: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, **more}


CLOSED: dict[str, Any] = {"additionalProperties": False}
NODE = structure({"left": {"$ref": "#/$defs/node"}, "value": {"type": "integer"}}, required=["value"], **CLOSED)
SCHEMAS: list[Any] = [
    {"type": "object"},
    structure({"a": {"type": "integer"}, "b": {"type": "boolean"}}, required=["a"], **CLOSED),
    structure({"a": {"type": "integer"}}, additionalProperties={"type": "boolean"}),
    structure({"a": {"type": "null"}}, required=["b"], additionalProperties={"type": "integer"}),
    structure({"a": {"type": "null"}, "b": {"type": "null"}}, minProperties=1, maxProperties=1, **CLOSED),
    {"type": "object", "patternProperties": {"^x_": {"type": "integer"}}, **CLOSED},
    {"properties": {"whitespace": {"const": "whitespace{0, 2}"}}, "required": ["whitespace"], **CLOSED},
    {"type": "string", "minLength": 2, "maxLength": 4},
    {"type": "string", "pattern": "^[A-C]{2}\\d+$"},
    {"type": "string", "pattern": "[a-z]"},
    {"type": "string", "pattern": "^.[^a]$|^(?:x|y.)"},
    {"type": "string", "pattern": "^a(?:[b-d][x-z]*)?$"},
    {"type": "string", "format": "ipv4"},
    {"type": "string", "format": "uuid"},
    {"type": "string", "format": "date-time"},
    {"type": "string", "format": "time"},
    {"type": "integer", "minimum": 3, "exclusiveMaximum": 170},
    {"type": "integer", "multipleOf": 7},
    {"type": "number", "minimum": -2.5, "maximum": 0.25},
    {"type": "array", "items": {"type": "null"}, "minItems": 2, "maxItems": 3},
    {"type": "array", "prefixItems": [{"type": "null"}, {"type": "boolean"}], "items": {"type": "integer"}},
    {"enum": [1, "a", None, {"x": [1, "é\n"]}]},
    {"type": "string", "enum": [1, "a", "b"]},
    {"type": ["string", "null"], "maxLength": 1},
    {"minimum": 10, "maxLength": 3},
    {"anyOf": [{"type": "null"}, {"type": "array", "items": {"type": "boolean"}}]},
    {"oneOf": [structure({"k": {"const": kind}}, required=["k"], **CLOSED) for kind in "ab"]},
    {"allOf": [{"type": "integer", "minimum": 3}]},
    {"$defs": {"node": NODE}, "$ref": "#/$defs/node"},
]
UNENFORCEABLE: list[tuple[Any, str]] = [
    ({"not": {"type": "string"}}, "'not'"),
    (structure({}, required=["a"], **CLOSED), "'required' and not allowed"),
    (structure({"a": {"type": "null"}}, minProperties=2), "'minProperties'"),
    (structure({"a": {}}, patternProperties={"x": {}}), "'patternProperties'"),
    ({"type": "string", "pattern": "a", "maxLength": 2}, "more than one of 'pattern'"),
    ({"type": "string", "pattern": '"'}, "a set of no characters"),
    ({"type": "string", "pattern": "a(?!b)"}, "lookaround"),
    ({"type": "number", "multipleOf": 0.5}, "'multipleOf'"),
    ({"type": "integer", "multipleOf": 7, "minimum": 0}, "'multipleOf'"),
    ({"type": "string", "enum": [1]}, "'enum' of these values"),
    ({"const": 2**64}, "'const' of these values"),
    ({"type": "null", "anyOf": [{"type": "null"}]}, "'type' beside 'anyOf'"),
    ({"$ref": "#/$defs/a", "maximum": 3, "$defs": {"a": {"type": "integer"}}}, r"'maximum' beside '\$ref'"),
    ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "'oneOf'"),
    ({"allOf": [{"type": "integer"}, {"minimum": 3}]}, "'allOf' of several"),
    ({"type": "array", "items": [{"type": "null"}]}, "a list of 'items'"),
]


@pytest.mark.parametrize("value", SCHEMAS, ids=json.dumps)
def test_samples_are_instances_of_the_schema(value: Any, backend: XGrammarBackend, words: Words) -> None:
    check = jsonschema_rs.Draft202012Validator(value, validate_formats=True)
    for text in instances(backend, schema(value), words):
        assert check.is_valid(json.loads(text)), text


@pytest.mark.parametrize(("value", "fault"), UNENFORCEABLE, ids=lambda each: json.dumps(each)[:40])
def test_what_its_converter_would_pass_over_is_refused_unless_lenient(
    value: Any, fault: str, backend: XGrammarBackend
) -> None:
    with pytest.raises(GrammarError, match=fault):
        backend.compile(schema(value))


def test_a_lenient_schema_is_enforced_as_far_as_it_can_be(backend: XGrammarBackend, words: Words) -> None:
    value = {"type": "integer", "minimum": 40, "maximum": 49, "not": {"const": 44}}
    for text in instances(backend, schema(value, lenient=True), words):
        assert 40 <= json.loads(text) <= 49


PATTERNS = [
    r"(19|20)[0-9]{2}-(0[1-9]|1[0-2])-[0-3][0-9]",
    r"the quick brown fox( jumps)*!",
    r"[^a-z\n]{1,3}x?",
    r"a.b",
    r"(?s:a.b){1,2}c*?",
    r"\d{2,3}\s\w[\w.]-\D\S\W?",
    r"^(?P<sign>[+-])?\x41{0,2}\.\/[]\\^-]$",
    r"(|one|two){2}",
    r"a(?:[b-d][x-z]*)?(?:1|[23]4*)?",
    r"[é-ü]+",
]


@pytest.mark.parametrize("pattern", PATTERNS)
def test_samples_match_the_regular_expression(
    pattern: str, backend: XGrammarBackend, other: LLGuidanceBackend, words: Words
) -> None:
    for seed in range(12):
        output = sampled(backend, regex(pattern), words, seed)
        if output is not None:
            assert re.fullmatch(pattern, words.text(output)), words.text(output)
            judge = other.compile(regex(pattern))
            judge.advance(output)
            assert judge.accepting
    assert sampled(backend, regex(pattern), words, 0) is not None


@pytest.mark.parametrize(
    ("pattern", "fault"),
    [
        (r"a(?=b)b", "lookaround"),
        (r"\bx", r"\\b"),
        (r"(?i)x", "the flag 'i'"),
        (r"a^b", "an anchor within"),
        (r"\p{Lu}", r"\\p"),
        (r"[a-z&&[^b]]", "a set within a set"),
        ("(x", "not closed"),
        ("x)", "not open"),
        ("a{2,1}", "^EBNF parser error"),
    ],
)
def test_regular_expressions_it_would_read_in_another_way_are_refused(
    pattern: str, fault: str, backend: XGrammarBackend
) -> None:
    with pytest.raises(GrammarError, match=fault):
        backend.compile(regex(pattern))


PERSON = structure({"age": {"type": "integer"}, "colour": {"enum": ["crimson", "violet"]}}, required=["age"], **CLOSED)
LIST = {"type": "array", "items": {"anyOf": [{"type": "boolean"}, {"type": "null"}]}, "minItems": 1, "maxItems": 4}
SUM = """
start: term ("+" term){1,3}
term: NUMBER | "(" start ")"
NUMBER: /[1-9][0-9]{0,2}/
"""
CALLS = f"""start: rule_1
rule_1: <[{CALL}]> %json {json.dumps({"x-guidance": SPACE, "const": "a/b"})} <[{CALL_ENDS}]> rule_2?
rule_2: /\\n{{0,2}}/ "say \\"//\\" " /[a-b\\/]/ # "%json
"""
THOUGHTS = f'start: <[^{CALL_ENDS},{END}]>{{0,4}} <tool_call> /\\n{{0,2}}/ ("yes" | "yes, but") <[{CALL_ENDS}]>'
SEVERAL = {"name": "turn", "lark_grammar": 'start: "[" @tercet "]"'}, {"name": "tercet", "json_schema": {"const": 5}}
SAME: dict[str, Grammar] = {
    "person": schema(PERSON),
    "compact person": Grammar(
        GrammarKind.JSON_SCHEMA, json.dumps({**PERSON, "x-guidance": {"whitespace_flexible": False}})
    ),
    "list": schema(LIST),
    "tree": schema({"$defs": {"node": NODE}, "$ref": "#/$defs/node"}),
    "date": regex(PATTERNS[0]),
    "loops": regex("a(?:[b-d][x-z]*)?"),
    "loops in lark": lark("start: /a(?:[b-d][x-z]*)?/ TAIL\nTAIL: /(?:1|[23]4*)?/"),
    "phrase": regex(PATTERNS[1]),
    "sum": lark(SUM),
    "calls": lark(CALLS),
    "thoughts": lark(THOUGHTS),
    "several": lark(json.dumps({"grammars": SEVERAL})),
}


@pytest.mark.parametrize("name", SAME)
def test_it_allows_what_llguidance_allows(
    name: str, backend: XGrammarBackend, other: LLGuidanceBackend, words: Words
) -> None:
    """Along samples: what one's mask allows continues an output for the other, though in another spelling."""
    chance = random.Random(name)
    for seed in range(4):
        output = sampled(backend, SAME[name], words, seed, most=40)
        ours, theirs = backend.compile(SAME[name]), other.compile(SAME[name])
        for token in [*(output or []), None]:
            assert ours.accepting == theirs.accepting
            allowed_here, allowed_there = allowed(backend, ours)[0], allowed(other, theirs)[0]
            assert (END in allowed_here) == (END in allowed_there)
            for tokens, judge in ((allowed_here, theirs), (allowed_there, ours)):
                for each in chance.sample(sorted(tokens - {END}), min(len(tokens - {END}), 12)):
                    copy = judge.copy()
                    copy.advance([each])
                    assert not copy.error, f"{words.text((output or [])[:9])!r} and then {words.text([each])!r}"
            if token is not None:
                ours.advance([token])
                theirs.advance([token])


def test_only_the_white_space_that_frontends_ask_for_is_allowed(backend: XGrammarBackend, words: Words) -> None:
    verdicts = {}
    for space in ("", " ", "\n  ", "\r\n\t", "  ", "\t", "\n\n", "\n" + 33 * " "):
        matcher = backend.compile(schema(LIST))
        matcher.advance(words(f"[{space}true,{space}null]"))
        verdicts[space] = matcher.accepting and not matcher.error
    assert [*verdicts.values()] == [True] * 4 + [False] * 4


def test_free_text_never_holds_an_added_token(backend: XGrammarBackend) -> None:
    first = allowed(backend, backend.compile(lark(f'start: /(?s:.*)/ <[{CALL}]> "x"')))[0]
    assert first & {PAD, END, CALL, CALL_ENDS} == {CALL}
    assert len(first) > 2500


@pytest.mark.parametrize("begin", [f"<[{CALL}]>", "<tool_call>"])
def test_a_budget_of_reasoning_cannot_be_passed_as_an_answer(begin: str, backend: XGrammarBackend) -> None:
    text = f"start: ({begin} <[^{CALL_ENDS},{END}]>{{0,2}} <[{CALL_ENDS}]>)? <[^{END}]>*"
    for grammar in (lark(text), lark(json.dumps({"grammars": [{"name": "turn", "lark_grammar": text}]}))):
        matcher = backend.compile(grammar)
        assert CALL in allowed(backend, matcher)[0]
        matcher.advance([CALL, 68, 69])
        assert allowed(backend, matcher) == [{CALL_ENDS}]
        matcher.advance([CALL_ENDS, 68, 69, 70])
        assert matcher.accepting
        assert not matcher.error


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ('start: rule_1 "x"\nrule_1[lazy]: FREE_TEXT "<"\nFREE_TEXT: /(?s:.*)/', "no rules with options"),
        ("start: TEXT\nTEXT: /(?s:.*)/ & ~/.*x.*/", "'&' is not supported"),
        ('start: "a" <[2-3]>', "no end token within"),
        ("start: <|nobody|>", "no token"),
        ("start: missing", "missing"),
        ("start: %json {", "not JSON"),
        ('{"grammars": []}', "begins with one in Lark"),
        ("", "start"),
    ],
)
def test_lark_it_cannot_do_exactly_is_refused(text: str, fault: str, backend: XGrammarBackend) -> None:
    with pytest.raises(GrammarError, match=fault):
        backend.compile(lark(text))


def test_an_output_ends_with_an_end_token_and_only_where_it_accepts(backend: XGrammarBackend, words: Words) -> None:
    matcher = backend.compile(regex("ab"))
    assert END not in allowed(backend, matcher)[0]
    matcher.advance(words("ab"))
    assert matcher.accepting
    assert not matcher.finished
    assert allowed(backend, matcher) == [{END}]
    matcher.advance([END])
    assert matcher.finished
    assert not matcher.error
    assert allowed(backend, matcher) == [set()]


def test_many_masks_at_once_are_those_of_each_alone(backend: XGrammarBackend, words: Words) -> None:
    matchers = []
    for length in range(24):
        matchers.append(backend.compile(regex("(ab|cd|[e-z]){0,30}!")))
        matchers[-1].advance(words("ab" * length)[:length])
    matchers[5].advance([END])
    assert matchers[5].error
    together = allowed(backend, *matchers)
    assert together == [allowed(backend, matcher)[0] for matcher in matchers]
    assert len({frozenset(mask) for mask in together}) > 1


def test_copies_go_their_own_ways(backend: XGrammarBackend, words: Words) -> None:
    matcher = backend.compile(regex("(yes|no)!"))
    before = allowed(backend, matcher)
    copied = matcher.copy()
    copied.advance(words("no"))
    assert allowed(backend, matcher) == before
    copied.advance(words("no"))
    assert copied.error
    assert copied.copy().error
    assert not matcher.error
    matcher.advance(words("yes!"))
    assert matcher.accepting
    assert matcher.forced() == []


def test_tokenizers_that_do_not_fit_the_model_are_refused(tokenizer_text: str) -> None:
    with pytest.raises(ValueError, match="vocab"):
        XGrammarBackend(tokenizer_text, VOCAB - 1, [END])
    with pytest.raises(ValueError, match="tokenizer"):
        XGrammarBackend("{}", VOCAB, [END])


def test_a_model_with_more_ids_than_its_tokenizer_never_says_them(tokenizer_text: str) -> None:
    wide = XGrammarBackend(tokenizer_text, VOCAB + 100, [END])
    for grammar in (regex("(?s).*"), lark(f"start: <[^{END}]>*")):
        masks = np.full((1, -(-(VOCAB + 100) // 32)), -1, dtype=np.int32)
        wide.fill([wide.compile(grammar)], masks)
        bits = np.unpackbits(masks.view(np.uint8), axis=1, bitorder="little")[0]
        assert bits[:VOCAB].any()
        assert not bits[VOCAB:].any()
