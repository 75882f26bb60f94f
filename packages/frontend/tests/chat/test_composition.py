"""One bad constraint among several: named with its tool and place, or left out if it is optional."""

import re
from typing import Any

import pytest

from packages.frontend.tests.chat.test_call_grammar import written
from packages.frontend.tests.chat.vocabulary import accepts, tokenizer, tokens
from tercet.frontend.chat.answer_grammar import EnforcedCalls, Thinking, answer_grammar, composition
from tercet.frontend.constraints import Constraint, Regex
from tercet.frontend.errors import BadRequestError
from tercet.frontend.model.served_model import ModelFiles, ServedModel
from tercet.frontend.parsers.port import ToolSpec
from tercet.frontend.parsers.registry import reasoning_format, tool_format
from tercet.frontend.structured_output.checker import GrammarChecker
from tercet.frontend.structured_output.composition import checked
from tercet.frontend.structured_output.worker import grammar_error
from tercet.protocol.messages.values import Grammar, ModelIdentity, ModelLimits

BAD: dict[str, Any] = {"type": "object", "properties": {"secret": {"enum": []}}, "required": ["secret"]}
GOOD: dict[str, Any] = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}

SAME_REGEXES = [("a\\\nb", "a\nb"), ("a\nb", "a\nb"), ("a/b", "a/b"), (r"a\/b", "a/b"), ('a"b', 'a"b'), (r"\\", "\\")]
SAME_REGEXES += [
    ("a\\\rb", "a\rb"),
    ("a\tb", "a\tb"),
    ("(?i)a", "A"),
    ("/", "/"),
    ("#", "#"),
    ("//", "//"),
    (r"\\/", "\\/"),
]


class _DirectChecker(GrammarChecker):
    """Checker in this process."""

    async def check(self, grammar: Grammar, model: ServedModel, param: str = "response_format") -> None:
        from packages.frontend.tests.chat.vocabulary import _reader

        if fault := grammar_error(grammar, _reader()):
            raise BadRequestError(f"The grammar is refused: {fault}.", param=param, code="invalid_grammar")


@pytest.fixture(scope="module")
def model() -> ServedModel:
    files = ModelFiles({"tokenizer.json": tokenizer().to_str().encode()})
    limits = ModelLimits(
        model="tiny", context_length=64, vocab_size=tokenizer().get_vocab_size(), max_total_tokens=64, eos_token_ids=[1]
    )
    return ServedModel("tiny", files, limits, ModelIdentity(weights="w"))


async def grammar_of(
    model: ServedModel,
    *tools: ToolSpec,
    required: bool = True,
    constraint: Constraint | None = None,
    thinking: Thinking | None = None,
    notation: str = "hermes",
) -> Grammar:
    calls = EnforcedCalls(framing=tool_format(notation).framing, tools=tools, required=required, several=True)
    whole = answer_grammar(tokens(), thinking, calls, constraint)
    parts = composition(tokens(), thinking, calls, constraint)
    return await checked(_DirectChecker(), whole, parts, model, "tools")


@pytest.mark.parametrize(
    ("schema", "notation"), [(BAD, "hermes"), (BAD, "glm"), ({**GOOD, "allOf": [{"enum": [1]}]}, "hermes")]
)
async def test_an_optional_bad_tool_takes_any_arguments(model: ServedModel, schema: Any, notation: str) -> None:
    bad = ToolSpec("bad", schema, param="tools[1].function.parameters")
    grammar = await grammar_of(model, ToolSpec("good", GOOD), bad, notation=notation)
    [name] = schema["properties"]
    assert accepts(grammar, written(notation, ("bad", {name: "anything"})))
    assert accepts(grammar, written(notation, ("good", {"a": 1})))
    assert not accepts(grammar, written(notation, ("good", {"a": "x"})))


async def test_a_strict_bad_tool_is_named_and_no_other(model: ServedModel) -> None:
    bad = ToolSpec("bad", {**BAD, "additionalProperties": False}, strict=True, param="tools[1].function.parameters")
    with pytest.raises(BadRequestError) as error:
        await grammar_of(model, ToolSpec("good", GOOD), bad, required=False)
    assert error.value.param == "tools[1].function.parameters"
    assert "'bad'" in error.value.message
    assert not re.search(r"good|rule_|Regex|secret|\\", error.value.message)


async def test_a_bad_regex_beside_tools_is_named(model: ServedModel) -> None:
    with pytest.raises(BadRequestError, match="look-around") as error:
        await grammar_of(
            model, ToolSpec("good", GOOD), required=False, constraint=Regex(pattern="(?=a)b", param="regex")
        )
    assert error.value.param == "regex"


@pytest.mark.parametrize(
    ("pattern", "text"),
    SAME_REGEXES,
)
async def test_a_regex_means_the_same_alone_and_beside_others(model: ServedModel, pattern: str, text: str) -> None:
    constraint = Regex(pattern=pattern)
    thinking = Thinking(framing=reasoning_format("qwen3").framing, opened=True)
    assert accepts(answer_grammar(tokens(), None, None, constraint), text)
    assert accepts(answer_grammar(tokens(), thinking, None, constraint), f"thought</think>{text}")
    assert accepts(await grammar_of(model, ToolSpec("good", GOOD), required=False, constraint=constraint), text)


async def test_a_required_name_without_a_property_is_allowed(model: ServedModel) -> None:
    tool = ToolSpec("f", {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a", "b"]})
    grammar = await grammar_of(model, tool)
    assert accepts(grammar, written("hermes", ("f", {"a": 1, "b": "x"})))
    assert not accepts(grammar, written("hermes", ("f", {"a": 1})))


@pytest.mark.parametrize(
    ("pattern", "text"),
    [
        ("^[^[]+$", "ab&"),
        ("^{a}$", "{a}"),
        (r"^\cA?x$", "x"),
        ("^[a&&b]+$", "a&b"),
        (r"^\-$", "-"),
        (r"^[\w-.]+$", "a-."),
    ],
)
async def test_patterns_are_those_of_ecmascript(model: ServedModel, pattern: str, text: str) -> None:
    tool = ToolSpec("f", {"type": "object", "properties": {"a": {"type": "string", "pattern": pattern}}})
    grammar = await grammar_of(model, ToolSpec("good", GOOD), tool)
    assert accepts(grammar, written("hermes", ("f", {"a": text})))
    assert not accepts(grammar, written("hermes", ("f", {"a": "[٣"})))


async def test_annotations_do_not_bind(model: ServedModel) -> None:
    value = {"type": "integer", "format": "int64", "nullable": True, "propertyOrdering": ["a"], "uniqueItems": False}
    tool = ToolSpec("f", {"type": "object", "properties": {"a": value}, "required": ["a"]})
    grammar = await grammar_of(model, tool)
    assert accepts(grammar, written("hermes", ("f", {"a": 1})))
    assert not accepts(grammar, written("hermes", ("f", {"a": "1"})))
