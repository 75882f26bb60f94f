"""Translation of constraints, and the texts that llguidance accepts for the result."""

import json
from typing import Any

import pytest

from packages.frontend.tests.structured_output.matching import TextMatcher
from tercet.frontend.constraints import (
    Choice,
    Constraint,
    Ebnf,
    JsonObject,
    JsonSchema,
    Lark,
    Regex,
    StructuralTag,
    Tag,
    Tokens,
)
from tercet.frontend.errors import BadRequestError
from tercet.frontend.structured_output.compiler import to_grammar
from tercet.frontend.structured_output.limits import MAX_OPTIONS, MAX_TEXT
from tercet.protocol.messages.values import GrammarKind

CITY: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
CALL = Tag(begin="<call=city>", content=JsonSchema(schema=CITY), end="</call>")
NUMBER = Tag(begin="<call=number>", content=Regex(pattern="[0-9]+"), end="</call>")
SPECIAL = Tag(begin="<|im_start|>tool", content=JsonObject(), end="\n")


@pytest.mark.parametrize(
    ("constraint", "kind", "taken", "refused"),
    [
        (JsonObject(), GrammarKind.JSON_SCHEMA, ["{}", '{"a": [1, {"b": null}]}'], ["[]", "{", " {}", "{} "]),
        (
            JsonSchema(schema=CITY, strict=True),
            GrammarKind.JSON_SCHEMA,
            ['{"city":"Oslo"}', '{\n  "city": "Ålesund 🙂"\n}'],
            ["{}", '{"city":1}', '{"city":"x","b":1}'],
        ),
        (JsonSchema(schema=True), GrammarKind.JSON_SCHEMA, ["1", "[]", '"x"'], ["x"]),
        (Regex(pattern=r"a/b\d{2,3}|\n"), GrammarKind.REGEX, ["a/b12", "\n"], ["a/b1", "a/b1234", "xa/b12"]),
        (
            Choice(options=["yes", "no", 'a "quoted"\nline 🙂', "</think>"]),
            GrammarKind.LARK,
            ["yes", 'a "quoted"\nline 🙂'],
            ["y", "yesno", ""],
        ),
        (Lark(text='start: "a" B\nB: /b+/'), GrammarKind.LARK, ["abb"], ["a", "b"]),
        (Ebnf(text='start: "a" B\nB: /b+/'), GrammarKind.LARK, ["abb"], ["a", "b"]),
        (Ebnf(text='root ::= "a" ("b" root)?'), GrammarKind.LARK, ["a", "aba"], ["ab", ""]),
    ],
)
def test_texts_are_instances_or_not(
    matcher: TextMatcher,
    tokens: Tokens,
    constraint: Constraint,
    kind: GrammarKind,
    taken: list[str],
    refused: list[str],
) -> None:
    grammar = to_grammar(constraint, tokens)
    assert grammar.kind is kind
    assert [text for text in taken if not matcher.accepts(grammar, text)] == []
    assert [text for text in refused if matcher.accepts(grammar, text)] == []


def test_white_space_within_json_is_bounded(matcher: TextMatcher, tokens: Tokens) -> None:
    grammar = to_grammar(JsonObject(), tokens)
    assert matcher.accepts(grammar, '{"a": 1,\n' + " " * 32 + '"b":\r\n\t2 }')
    assert not matcher.accepts_prefix(grammar, '{"a":  ')
    assert not matcher.accepts_prefix(grammar, '{"a":\n\n')
    assert not matcher.accepts_prefix(grammar, '{"a":\n' + " " * 33)


def test_an_older_draft_does_not_switch_newer_keywords_off(matcher: TextMatcher, tokens: Tokens) -> None:
    schema = {"$schema": "http://json-schema.org/draft-04/schema#", "const": 5}
    grammar = to_grammar(JsonSchema(schema=schema), tokens)
    assert matcher.accepts(grammar, "5")
    assert not matcher.accepts_prefix(grammar, "6")


TAGS = StructuralTag(tags=[CALL, NUMBER, SPECIAL], triggers=["<call=", "<|im_start|>"])


@pytest.mark.parametrize(
    ("structural", "taken", "refused"),
    [
        (
            TAGS,
            [
                "",
                "hi there",
                'hi <call=city>{"city":"x"}</call> and <call=number>12</call>',
                "a<|im_start|>tool{}\nb<s>",
            ],
            ["<call=", "<call=town>{}</call>", "<call=number>x</call>", "a<|im_start|>b", "<call=number>1"],
        ),
        (
            StructuralTag(tags=[NUMBER], triggers=["<call="], at_least_one=True),
            ["<call=number>1</call>", "a<s>b<call=number>1</call>c<call=number>1</call>"],
            ["", "hi"],
        ),
        (
            StructuralTag(tags=[NUMBER], triggers=["<call="], only_one=True),
            ["hi", "hi <call=number>1</call>"],
            ["<call=number>1</call> more", "<call=number>1</call><call=number>1</call>"],
        ),
        (
            StructuralTag(tags=[NUMBER], triggers=["<call="], only_one=True, at_least_one=True),
            ["hi <call=number>1</call>"],
            ["hi", "<call=number>1</call> more"],
        ),
        (
            StructuralTag(tags=[NUMBER, SPECIAL], triggers=[], free=False, separator=", "),
            ["", "<call=number>1</call>", "<|im_start|>tool{}\n, <call=number>1</call>"],
            ["hi", "<call=number>1</call>, ", "<call=number>1</call><call=number>1</call>"],
        ),
        (
            StructuralTag(tags=[NUMBER], triggers=[], free=False, only_one=True, at_least_one=True),
            ["<call=number>1</call>"],
            ["", "<call=number>1</call><call=number>1</call>"],
        ),
    ],
)
def test_structural_tags(
    matcher: TextMatcher, tokens: Tokens, structural: StructuralTag, taken: list[str], refused: list[str]
) -> None:
    grammar = to_grammar(structural, tokens)
    assert [text for text in taken if not matcher.accepts(grammar, text)] == []
    assert [text for text in refused if matcher.accepts(grammar, text)] == []


@pytest.mark.parametrize(
    "constraint",
    [
        Choice(options=[], param="here"),
        Choice(options=["x"] * (MAX_OPTIONS + 1), param="here"),
        Lark(text='{"grammars": []}', param="here"),
        Ebnf(text=' {"grammars": []}', param="here"),
        Regex(pattern="x" * (MAX_TEXT + 1), param="here"),
        Choice(options=["é" * (MAX_TEXT // 2)] * 2, param="here"),
        JsonSchema(schema=False, param="here"),
        StructuralTag(tags=[], triggers=["x"], param="here"),
        StructuralTag(tags=[CALL], triggers=["<tool"], param="here"),
        StructuralTag(tags=[CALL], triggers=[""], param="here"),
        StructuralTag(tags=[CALL], triggers=["<"], separator="x" * 40_000, param="here"),
    ],
)
def test_what_cannot_be_translated_names_its_parameter(tokens: Tokens, constraint: Constraint) -> None:
    with pytest.raises(BadRequestError) as error:
        to_grammar(constraint, tokens)
    assert error.value.param == "here"


def test_names_in_a_users_grammar_are_their_own(matcher: TextMatcher, tokens: Tokens) -> None:
    """Both have a `rule_1`, and both a `start`."""
    mine = Lark(text='start: rule_1\nrule_1: "a" | TERMINAL_2\nTERMINAL_2: "b"')
    tag = Tag(begin="<call>", content=mine, end="</call>")
    grammar = to_grammar(StructuralTag(tags=[tag, NUMBER], triggers=["<call"]), tokens)
    assert json.loads(grammar.text)["grammars"][1]["lark_grammar"] == mine.text
    assert matcher.accepts(grammar, "hm<call>b</call><call=number>1</call>")
    assert not matcher.accepts_prefix(grammar, "hm<call>c")
