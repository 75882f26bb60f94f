"""Translation of GBNF to Lark."""

import contextlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from packages.frontend.tests.structured_output.matching import TextMatcher
from tercet.frontend.errors import BadRequestError
from tercet.frontend.structured_output.ebnf import to_lark
from tercet.protocol.messages.values import Grammar, GrammarKind

ARITHMETIC = r"""
# sums of products
root   ::= expr
expr   ::= term ( ("+" | "-") term )*   # left to right
term   ::= number |
           "(" expr ")"
number ::= [0-9]+ ws
ws     ::= [ \t\n]{0,2}
"""
JSON_LIST = r"""root ::= "[" ws (item ("," ws item)*)? "]"
item ::= string | root
string ::= "\"" ([^"\\\x00-\x1F] | "\\" ["\\/bfnrt])* "\"" ws
ws ::= [ ]*"""


@pytest.mark.parametrize(
    ("text", "taken", "refused"),
    [
        (ARITHMETIC, ["1", "1 +(23-4 )"], ["", "+1", "(1"]),
        (JSON_LIST, ["[]", '["a", ["\\n🙂"]]'], ["[", '["a" "b"]']),
        ('root ::= "x" | ', ["x", ""], ["xx"]),
        ('root ::= ("x" | ) "y"', ["xy", "y"], ["x"]),
        (r'root ::= "\x41\u00e9\U0001F642\n\"\\"', ['Aé🙂\n"\\'], ["A"]),
        (r"root ::= [\x41-\x43\]\-^]+", ["AB]-^"], ["D"]),
        (r"root ::= [^A-C]", ["D", "\n", "🙂"], ["A"]),
        ("root ::= [a-]", ["a", "-"], ["b"]),
        ('root ::= "a"{2} "b"{1,2} "c"{0,} "d"{,1}', ["aab", "aabbccd"], ["ab", "aabbb"]),
        ("root ::= . .", ["ab", "\n🙂"], ["a"]),
        ('root ::= some-Rule.2\nsome-Rule.2 ::= "x" some-Rule.2?', ["x", "xxx"], [""]),
        ('root::="a"b::="b"', ["a"], ["ab"]),
    ],
)
def test_texts_are_instances_or_not(matcher: TextMatcher, text: str, taken: list[str], refused: list[str]) -> None:
    grammar = Grammar(GrammarKind.LARK, to_lark(text, "ebnf"))
    assert [each for each in taken if not matcher.accepts(grammar, each)] == []
    assert [each for each in refused if matcher.accepts(grammar, each)] == []


def test_without_recursion_a_grammar_is_one_expression_and_exact(matcher: TextMatcher) -> None:
    """With separate terminals, the first would consume the text that the second needs."""
    grammar = Grammar(GrammarKind.LARK, to_lark("root ::= a b\na ::= [a-z]+\nb ::= [a-z]", "ebnf"))
    assert matcher.accepts(grammar, "abc")
    assert not matcher.accepts(grammar, "a")


def test_lark_is_left_as_it_is() -> None:
    assert to_lark('start: "a"', "ebnf") == 'start: "a"'


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('first ::= "a"', "no rule 'root'"),
        ("root ::= missing", "'missing'"),
        ('root ::= "a"\nroot ::= "b"', "two rules 'root'"),
        ('root ::= ("a"', "not closed"),
        ('root ::= "a")', "too many"),
        ('root ::= "a', "not understood"),
        ("root ::= [a", "not understood"),
        ("root ::= []", "no characters"),
        ("root ::= *", "nothing to repeat"),
        ('root ::= "a" | +', "nothing to repeat"),
        (r'root ::= "\uD800"', "no character"),
        (r'root ::= "\U00110000"', "no character"),
        ('root ::= (="a") "b"', "lookahead"),
        ('"a" root ::= "b"', "before the first rule"),
        ("root ::= " + "(" * 65 + ")" * 65, "brackets"),
        ("root ::= " + '"a" ' * 10_001, "symbols"),
        ("root ::= [" + "a" * 4097 + "]", "more than 4096"),
        ('root ::= "a"{1234567}', "not understood"),
        ("root ::= " + "x" * 131_072, "longer"),
    ],
)
def test_faults_are_told(text: str, words: str) -> None:
    with pytest.raises(BadRequestError) as error:
        to_lark(text, "ebnf")
    assert error.value.param == "ebnf"
    assert words in error.value.message


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.sampled_from(["root", "::=", "a", '"', "[", "]", "(", ")", "|", "*", "{1,", "}", "\\", "x", "\n", "#"]))
)
def test_any_text_is_taken_or_refused(words: list[str]) -> None:
    with contextlib.suppress(BadRequestError):
        to_lark("root ::= " + " ".join(words), "ebnf")
