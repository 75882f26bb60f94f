"""Combined constraints on an answer: reasoning, calls, formats, budgets."""

import pytest

from packages.frontend.tests.chat.test_call_grammar import TOOLS, written
from packages.frontend.tests.chat.vocabulary import accepts, tokens
from tercet.frontend.chat.answer_grammar import EnforcedCalls, Thinking, answer_grammar
from tercet.frontend.constraints import Choice, Constraint, Ebnf, JsonSchema, Regex
from tercet.frontend.errors import BadRequestError
from tercet.frontend.parsers.port import ReasoningFraming, ToolSpec
from tercet.frontend.parsers.registry import reasoning_format, tool_format
from tercet.protocol.messages.values import Grammar, GrammarKind, ThinkingBudget

SCHEMA = JsonSchema(
    schema={
        "type": "object",
        "properties": {"a": {"type": "integer"}},
        "required": ["a"],
        "additionalProperties": False,
    }
)
CALL = written("hermes", ("get_weather", {"city": "Oslo", "exact": True}))


def thinking(name: str = "qwen3", *, opened: bool = False, budget: int | None = None) -> Thinking:
    return Thinking(framing=reasoning_format(name).framing, opened=opened, budget=budget)


def calls(name: str = "hermes", *, required: bool = False) -> EnforcedCalls:
    return EnforcedCalls(framing=tool_format(name).framing, tools=TOOLS, required=required, several=True)


def grammar_of(
    thoughts: Thinking | None = None, called: EnforcedCalls | None = None, constraint: Constraint | None = None
) -> Grammar:
    return answer_grammar(tokens(), thoughts, called, constraint)


@pytest.mark.parametrize("opened", [True, False])
@pytest.mark.parametrize(
    ("constraint", "right", "wrong"),
    [
        (SCHEMA, '{"a": 1}', '{"a": "1"}'),
        (Regex(pattern="[a-z]+!"), "yes!", "yes"),
        (Choice(options=["yes", "no"]), "no", "maybe"),
        (Ebnf(text='root ::= "yes" | other\nother ::= "no"'), "no", "maybe"),
    ],
    ids=["schema", "regex", "choice", "ebnf"],
)
def test_a_format_begins_where_reasoning_ends(opened: bool, constraint: Constraint, right: str, wrong: str) -> None:
    grammar = grammar_of(thinking(opened=opened), None, constraint)
    begin = "" if opened else "<think>"
    assert accepts(grammar, f"{begin}Anything {{.</think>\n\n{right}")
    assert accepts(grammar, f"{begin}</think>{right}")
    assert not accepts(grammar, f"{begin}Anything.</think>\n\n{wrong}")
    assert not accepts(grammar, f"{begin}Anything.")
    assert accepts(grammar, right) is not opened
    assert not accepts(grammar, wrong)


def test_a_format_alone_stays_what_it_is() -> None:
    assert grammar_of(constraint=SCHEMA).kind is GrammarKind.JSON_SCHEMA


@pytest.mark.parametrize("constraint", [SCHEMA, Ebnf(text='root ::= "yes"')], ids=["schema", "ebnf"])
def test_tools_that_may_be_called_beside_a_format_are_an_alternative_to_it(constraint: Constraint) -> None:
    right = "yes" if isinstance(constraint, Ebnf) else '{"a": 1}'
    for thoughts, begin in ((None, ""), (thinking(opened=True), "hm</think>")):
        grammar = grammar_of(thoughts, calls(), constraint)
        assert accepts(grammar, begin + right)
        assert accepts(grammar, begin + CALL)
        assert not accepts(grammar, begin + "Hello")
        assert not accepts(grammar, begin + CALL + right)


def test_required_calls_come_after_reasoning() -> None:
    grammar = grammar_of(thinking(), calls(required=True))
    assert accepts(grammar, CALL)
    assert accepts(grammar, f"<think>{CALL} or not?</think>\n\n{CALL}")
    assert not accepts(grammar, "<think>hm</think>\n\nHello")


@pytest.mark.parametrize("opened", [True, False])
def test_a_budget_ends_reasoning_and_leaves_the_answer_free(opened: bool) -> None:
    begin = "" if opened else "<think>"
    grammar = grammar_of(thinking(opened=opened, budget=4))
    assert accepts(grammar, f"{begin}the</think>Hello <tool_call>")
    assert accepts(grammar, f"{begin}1234</think>Hello")
    assert not accepts(grammar, f"{begin}12345</think>Hello")
    assert not accepts(grammar, f"{begin}1234")
    none = grammar_of(thinking(opened=opened, budget=0))
    assert accepts(none, f"{begin}</think>Hello")
    assert not accepts(none, f"{begin}1</think>Hello")


REASON = ReasoningFraming(begin="<reason>", end="</reason>")


@pytest.mark.parametrize("opened", [True, False])
def test_a_budget_is_counted_by_schedulers_where_the_end_is_no_token(opened: bool) -> None:
    begin = "" if opened else "<reason>"
    budget = ThinkingBudget(2, "</reason>", begin)
    free = grammar_of(Thinking(framing=REASON, opened=opened, budget=2))
    assert free.thinking == budget
    assert accepts(free, f"{begin}123<tool_call>456</reason>Hello <tool_call>")
    constrained = grammar_of(Thinking(framing=REASON, opened=opened, budget=2), None, SCHEMA)
    assert constrained.thinking == budget
    assert accepts(constrained, f'{begin}</reason>{{"a": 1}}')
    assert accepts(constrained, f'{begin}a <b </re <tool_call> c</reason>{{"a": 1}}')
    assert not accepts(constrained, f'{begin}a</reason>b</reason>{{"a": 1}}')
    assert not accepts(constrained, f'{begin}a</reason>b<tool_call></reason>{{"a": 1}}')
    assert grammar_of(Thinking(framing=REASON, opened=opened), None, SCHEMA).thinking is None


def test_harmony_answers_in_its_final_channel() -> None:
    analysis = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant"
    grammar = grammar_of(thinking("gpt_oss"), None, SCHEMA)
    for begin in ("", analysis):
        assert accepts(grammar, begin + '<|channel|>final<|message|>{"a": 1}')
        assert not accepts(grammar, begin + "<|channel|>final<|message|>Hello")
    call = written("gpt_oss", ("now", {}))
    required = grammar_of(thinking("gpt_oss"), calls("gpt_oss", required=True))
    assert accepts(required, analysis + call)
    assert not accepts(required, analysis + "<|channel|>final<|message|>Hello")
    free = grammar_of(thinking("gpt_oss"), calls("gpt_oss"))
    assert accepts(free, analysis + "<|channel|>final<|message|>Hello")
    assert accepts(free, call)


def test_a_grammar_that_is_too_long_is_refused() -> None:
    long = ToolSpec("f", {"properties": {f"p{place}": {"enum": ["x" * 1000]} for place in range(200)}})
    many = EnforcedCalls(framing=tool_format("hermes").framing, tools=(long,), required=True, several=False)
    with pytest.raises(BadRequestError) as error:
        grammar_of(None, many)
    assert error.value.param == "tools"
