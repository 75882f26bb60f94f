"""A worker answers or ends, for every input."""

import contextlib
import json
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLTokenizer
from tokenizers import Tokenizer

from tercet.frontend.constraints import Choice, Constraint, Ebnf, JsonSchema, Lark, Regex, Tokens
from tercet.frontend.errors import BadRequestError
from tercet.frontend.helper.pipe import LENGTH, encode_frame
from tercet.frontend.structured_output.compiler import to_grammar
from tercet.frontend.structured_output.pipe import Check, GrammarVocabulary, Order, decode_verdict
from tercet.frontend.structured_output.worker import grammar_error
from tercet.protocol.messages.values import Grammar, GrammarKind

TOKENS = Tokens(added={"<think>": 324}, eos=[321])

words = st.sampled_from([*"ab09.*+?()[]{}|\\^$-,:/\"'\n é🙂", "(?", "\\d", "\\p{L}", "{2}", "{1,3}", "[^", "::=", "%"])
texts = st.lists(words, max_size=8).map("".join)
values = st.none() | st.booleans() | st.integers(-3, 70) | st.floats(allow_nan=False, allow_infinity=False) | texts
names = st.sampled_from(["a", "b", "not", ""])
kinds = st.sampled_from(["object", "array", "string", "integer", "number", "boolean", "null", "rhyme"])


def schemas(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Return JSON schemas, mostly sensible ones."""
    return st.fixed_dictionaries(
        {},
        optional={
            "type": kinds | st.lists(kinds, max_size=2) | values,
            "properties": st.dictionaries(names, inner, max_size=2) | values,
            "required": st.lists(names, max_size=2) | values,
            "additionalProperties": inner | values,
            "items": inner | st.lists(inner, max_size=2),
            "prefixItems": st.lists(inner, max_size=2),
            "anyOf": st.lists(inner, max_size=2),
            "oneOf": st.lists(inner, max_size=2),
            "allOf": st.lists(inner, max_size=2),
            "enum": st.lists(values, max_size=3),
            "const": values,
            "pattern": texts,
            "format": st.sampled_from(["date", "uuid", "iri"]),
            "minimum": values,
            "maximum": values,
            "minLength": values,
            "maxItems": values,
            "minProperties": values,
            "$ref": st.sampled_from(["#", "#/$defs/a", "#/nowhere", "http://elsewhere"]) | values,
            "$defs": st.dictionaries(names, inner, max_size=1),
        },
    )


constraints: st.SearchStrategy[Constraint] = st.one_of(
    texts.map(lambda text: Regex(pattern=text)),
    texts.map(lambda text: Ebnf(text=f"root ::= {text}")),
    texts.map(lambda text: Lark(text=f"start: {text}")),
    st.lists(texts, max_size=3).map(lambda options: Choice(options=options)),
    st.recursive(st.booleans() | schemas(st.just({})), schemas, max_leaves=4).map(
        lambda schema: JsonSchema(schema=schema)
    ),
)


@pytest.fixture(scope="session")
def native(tokenizer: Tokenizer) -> LLTokenizer:
    return LLTokenizer(tokenizer.to_str(), n_vocab=tokenizer.get_vocab_size(), eos_token=TOKENS.eos)


@settings(max_examples=200, deadline=None)
@given(constraint=constraints)
def test_any_constraint_compiles_or_is_refused(native: LLTokenizer, constraint: Constraint) -> None:
    with contextlib.suppress(BadRequestError):
        assert len(grammar_error(to_grammar(constraint, TOKENS), native)) <= 400


class Worker:
    """Worker process with the frontend's side of its pipes."""

    def __init__(self) -> None:
        command = [sys.executable, "-m", "tercet.frontend.structured_output.worker"]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def ask(self, order: Order) -> str:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(encode_frame(order))
        self.process.stdin.flush()
        size = int.from_bytes(self.process.stdout.read(LENGTH), "little")
        return decode_verdict(self.process.stdout.read(size)).error


@pytest.fixture
def worker(files: dict[str, bytes], tokenizer: Tokenizer) -> Iterator[Worker]:
    running = Worker()
    size = tokenizer.get_vocab_size()
    assert running.ask(GrammarVocabulary(tokenizer_json=files["tokenizer.json"], vocab_size=size, eos=TOKENS.eos)) == ""
    yield running
    running.process.kill()
    running.process.communicate()


def test_the_process_ends_with_its_input(worker: Worker) -> None:
    assert worker.ask(Check(grammar=Grammar(GrammarKind.REGEX, "a"), seconds=1)) == ""
    worker.process.communicate(timeout=60)
    assert worker.process.returncode == 0


def test_a_check_that_nobody_can_wait_for_ends_all_the_same(worker: Worker) -> None:
    """The frontend may be killed in the middle of a check."""
    bomb = Grammar(GrammarKind.JSON_SCHEMA, json.dumps({"type": "integer", "multipleOf": 99999999}))
    worker.process.communicate(encode_frame(Check(grammar=bomb, seconds=0.2)), timeout=120)
    assert worker.process.returncode != 0


def test_processor_time_is_counted_for_each_check_alone(worker: Worker) -> None:
    for number in range(40):
        many = Grammar(GrammarKind.REGEX, "|".join(f"[a-z]{{{number + 1}}}{each}" for each in range(60)))
        assert worker.ask(Check(grammar=many, seconds=0.5)) == ""
