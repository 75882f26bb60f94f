"""End tokens that are ordinary text: allowed exactly where the output is an instance, never within one."""

import json
import random
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer

from tercet.protocol.messages.values import Grammar, GrammarKind
from tercet.scheduler.grammar.backends import BACKENDS
from tercet.scheduler.grammar.port import GrammarBackend, Matcher
from tercet.scheduler.model_files import resolve_model

VOCAB = 3072
MOST = 160
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "the": {"enum": ["the end", "then", "other"]},
        "a": {"type": "string", "maxLength": 12},
        "n": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["the", "a", "n"],
    "additionalProperties": False,
}
Make = Callable[[list[int]], GrammarBackend[Any]]


@pytest.fixture(scope="module")
def tokenizer_text() -> str:
    return (Path(resolve_model("embedded")) / "tokenizer.json").read_text(encoding="utf-8")


@pytest.fixture(scope="module", params=[name for name in BACKENDS if find_spec(name)])
def make(request: pytest.FixtureRequest, tokenizer_text: str) -> Make:
    return lambda ends: BACKENDS[request.param](tokenizer_text, VOCAB, ends)


@pytest.fixture(scope="module")
def spelled(tokenizer_text: str) -> Tokenizer:
    return Tokenizer.from_str(tokenizer_text)


def one(spelled: Tokenizer, text: str) -> int:
    [token] = spelled.encode(text, add_special_tokens=False).ids
    return int(token)


def allowed(backend: GrammarBackend[Any], matcher: Matcher) -> list[int]:
    masks = np.zeros((1, VOCAB // 32), dtype=np.int32)
    backend.fill([matcher], masks)
    bits = np.unpackbits(masks.view(np.uint8), bitorder="little")
    tokens: list[int] = bits.nonzero()[0].tolist()
    return tokens


def is_instance(value: Any) -> bool:
    """Return whether a value is an instance of SCHEMA."""
    return (
        list(value) == ["the", "a", "n"]
        and value["the"] in SCHEMA["properties"]["the"]["enum"]
        and isinstance(value["a"], str)
        and len(value["a"]) <= 12
        and type(value["n"]) is int
        and 0 <= value["n"] <= 99
    )


def walk(backend: GrammarBackend[Any], matcher: Matcher, ends: set[int], chance: random.Random) -> list[int]:
    """Return the tokens of one output: random, ended by the first end token, forced ones included."""
    output: list[int] = []
    while len(output) < MOST:
        for token in matcher.forced():
            output.append(token)
            matcher.advance([token])
            if token in ends:
                return output
        tokens = allowed(backend, matcher)
        if matcher.finished:
            return output
        found = [token for token in tokens if token in ends]
        assert bool(found) == matcher.accepting
        output.append(found[0] if found else chance.choice(tokens))
        if found:
            return output
        matcher.advance(output[-1:])
    return []


@pytest.mark.parametrize("texts", [["the"], ["en", "er"], ["1", "2"], ["en", "<|im_end|>"]])
def test_an_answer_with_such_a_vocabulary_is_an_instance(make: Make, spelled: Tokenizer, texts: list[str]) -> None:
    ends = [one(spelled, text) for text in texts]
    backend, chance, complete = make(ends), random.Random(1), 0
    compiled = backend.compile(Grammar(GrammarKind.JSON_SCHEMA, json.dumps(SCHEMA)))
    for _ in range(12):
        if output := walk(backend, compiled.copy(), set(ends), chance):
            text = spelled.decode([token for token in output if token not in ends], skip_special_tokens=False)
            assert is_instance(json.loads(text)), text
            complete += 1
    assert complete


def test_a_text_of_an_end_token_is_spelled_with_other_tokens(make: Make, spelled: Tokenizer) -> None:
    end = one(spelled, "the")
    backend = make([end])
    matcher = backend.compile(Grammar(GrammarKind.REGEX, "(the )?the"))
    assert end not in allowed(backend, matcher)
    for letter in "the":
        matcher.advance([one(spelled, letter)])
    assert end in allowed(backend, matcher)
    assert matcher.accepting
