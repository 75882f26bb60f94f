"""Patterns in Rust's syntax find what an engine of ECMAScript's own (`regress`) finds."""

import json
import random

import pytest
from llguidance import LLMatcher, LLTokenizer
from regress import Regex, RegressError

from tercet.frontend.structured_output.ecma_regex import PatternError, translated

BYTES = LLTokenizer("byte")
ATOMS = ["a", "b", "[^[]", "[a&&b]", r"\cA", r"\d", r"\w", r"\s", r"\S", r"\W", r"\D", ".", "[^]", r"[\w-.]", "[a-c]"]
ATOMS += ["{", "{a}", "}", "]", r"\/", r"\-", r"\.", "a{2}", "b+", "c*", "d?", "(?:ab|c)", "(x)", "(?<n>y)", r"\u0041"]
ATOMS += [
    r"\x42",
    "[-a]",
    "[a-]",
    r"[\]\[]",
    r"[\b]",
    r"\0",
    "é",
    "[é-ü]",
    "[^a]",
    "/",
    '"',
    "-",
    "&&",
    "~~",
    "a{1,2}?",
]
ATOMS += [
    "x{,3}",
    r"\$",
    "[$^]",
    "[.]",
    "[|]",
    r"\t",
    " ",
    "#",
    "[#]",
    r"[\d-a]",
    "[--a]",
    r"\u{1F600}",
    r"\ud83d\ude00",
]
SIGNS = [*'abcxydAB[]{}&~1_-/."é \t\n$^|#\\,3*+?()', "\x01", "\0", "\x08", "\u2028", "\u00a0", "٣", "😀"]

NOT_REGULAR = [
    "(?=a)b",
    "(?!a)b",
    "(?<=a)b",
    "(?<!a)b",
    r"\ba",
    r"a\B",
    r"(a)\1",
    r"(?<n>a)\k<n>",
    "[]",
    "(",
    ")",
    "[a",
]
NOT_REGULAR += ["\\", "*a", "a**", "[b-a]", r"\u{110000}", r"\ud800", "(" * 200 + ")" * 200, "(?x)a"]


def finds(pattern: str, texts: list[str]) -> list[bool]:
    grammar = LLMatcher.grammar_from_json_schema(json.dumps({"type": "string", "pattern": translated(pattern)}))
    matcher = LLMatcher(BYTES, grammar, log_level=0)
    assert not matcher.is_error(), (pattern, matcher.get_error())
    found = []
    for text in texts:
        copy, data = matcher.deep_copy(), list(json.dumps(text, ensure_ascii=False).encode())
        found.append(bool(copy.try_consume_tokens(data) == len(data) and copy.is_accepting()))
    return found


def engine_of(pattern: str) -> Regex | None:
    try:
        return Regex(pattern, "u" if r"\u{" in pattern or r"\ud83d" in pattern else "")
    except RegressError:
        return None


@pytest.mark.parametrize("seed", range(4))
def test_random_patterns_find_the_same_texts(seed: int) -> None:
    chance, tried = random.Random(seed), 0
    while tried < 100:
        pattern = "".join(chance.choice(ATOMS) for _ in range(chance.randint(1, 4)))
        pattern = chance.choice(["", "^"]) + pattern + chance.choice(["", "$"])
        if (engine := engine_of(pattern)) is None:
            continue
        tried += 1
        texts = ["".join(chance.choice(SIGNS) for _ in range(chance.randint(0, 5))) for _ in range(20)]
        texts += chance.sample(SIGNS, 15)
        assert finds(pattern, texts) == [engine.find(text) is not None for text in texts], pattern


@pytest.mark.parametrize(
    ("pattern", "text"),
    [(r"\Aa+\Z", "aa"), (r"^a\z", "a"), ("(?P<year>[0-9]{4})", "1999"), ("(?i)abc", "ABC"), (r"\p{Lu}", "É")],
)
def test_other_syntax_that_clients_send_is_read_as_they_mean_it(pattern: str, text: str) -> None:
    assert finds(pattern, [text, "-"]) == [True, False]


@pytest.mark.parametrize(
    "pattern",
    NOT_REGULAR,
)
def test_patterns_without_an_equivalent_are_refused(pattern: str) -> None:
    with pytest.raises(PatternError):
        translated(pattern)
