"""Calls accepted by a grammar parse as calls that follow the tool's schema, in every notation."""

import json
from typing import Any

import pytest

from packages.frontend.tests.chat.vocabulary import accepts, sample_answer, tokens
from packages.frontend.tests.parsers.transcripts import Call, read
from tercet.frontend.chat.answer_grammar import EnforcedCalls, Thinking, answer_grammar
from tercet.frontend.errors import BadRequestError
from tercet.frontend.parsers.call_writer import write_calls
from tercet.frontend.parsers.port import Style, ToolSpec
from tercet.frontend.parsers.registry import TOOL_FORMATS, reasoning_format, tool_format, tool_parser
from tercet.protocol.messages.values import Grammar

WEATHER = ToolSpec(
    "get_weather",
    {
        "type": "object",
        "properties": {
            "city": {"type": "string", "maxLength": 8},
            "unit": {"enum": ["C", "F"]},
            "days": {"type": "integer", "minimum": 0, "maximum": 99},
            "exact": {"type": "boolean"},
        },
        "required": ["city", "exact"],
        "additionalProperties": False,
    },
)
NOW = ToolSpec("now")
TOOLS = (WEATHER, NOW)
HARMONY = reasoning_format("gpt_oss").framing
OSLO = ("get_weather", {"city": "Oslo", "exact": True})


def grammar_of(
    name: str,
    tools: tuple[ToolSpec, ...] = TOOLS,
    *,
    required: bool = True,
    several: bool = True,
    thinking: Thinking | None = None,
) -> Grammar:
    calls = EnforcedCalls(framing=tool_format(name).framing, tools=tools, required=required, several=several)
    return answer_grammar(tokens(), thinking, calls, None)


def written(name: str, *calls: tuple[str, dict[str, Any]]) -> str:
    """Write calls in a notation, as a model under a grammar does."""
    text = write_calls(tool_format(name).framing, calls)
    if tool_format(name).framing.style is Style.PYTHON:
        text = text.replace("True", "true")  # JSON literals
    return text.removesuffix("<|call|>")  # ends the answer


def begun(name: str) -> str:
    """Return words after which a call of this notation may begin."""
    return "Let me look.\n" if tool_format(name).framing.line_start else "Let me look. "


def calls_in(name: str, text: str, tools: tuple[ToolSpec, ...] = TOOLS) -> list[Call]:
    found = read(tool_parser(tool_format(name), tools), [text])
    assert found.text == ""
    return found.calls


def is_weather(arguments: Any) -> bool:
    return (
        isinstance(arguments.pop("city"), str)
        and isinstance(arguments.pop("exact"), bool)
        and arguments.pop("unit", "C") in {"C", "F"}
        and type(arguments.pop("days", 0)) is int
        and not arguments
    )


@pytest.mark.parametrize("name", TOOL_FORMATS)
def test_calls_of_the_notation_are_let_through(name: str) -> None:
    grammar = grammar_of(name)
    assert accepts(grammar, written(name, OSLO))
    assert accepts(grammar, written(name, ("now", {})))
    full = {"city": "Oslo", "unit": "C", "days": 3, "exact": False}
    assert accepts(grammar, written(name, ("get_weather", full)).replace("False", "false"))


@pytest.mark.parametrize("name", TOOL_FORMATS)
@pytest.mark.parametrize(
    "call",
    [
        ("get_time", {}),
        ("get_weather", {"city": "Oslo"}),
        ("get_weather", {"city": "Oslo", "days": "soon", "exact": True}),
        ("get_weather", {"city": "Oslo", "unit": "K", "exact": True}),
        ("get_weather", {"city": "Oslo on the fjord", "exact": True}),
        ("get_weather", {"city": "Oslo", "exact": True, "more": 1}),
    ],
    ids=["no such tool", "argument missing", "wrong type", "not in the enum", "too long", "argument unknown"],
)
def test_no_other_calls_are(name: str, call: tuple[str, dict[str, Any]]) -> None:
    assert not accepts(grammar_of(name), written(name, call))


@pytest.mark.parametrize("name", TOOL_FORMATS)
def test_a_required_call_is_no_text(name: str) -> None:
    grammar = grammar_of(name)
    assert not accepts(grammar, "")
    assert not accepts(grammar, "Hello")
    assert not accepts(grammar, "Hello" + written(name, OSLO))
    assert not accepts(grammar, written(name, OSLO) + "Hello")


@pytest.mark.parametrize("name", [name for name in TOOL_FORMATS if name != "gpt_oss"])
def test_several_calls_where_they_are_allowed(name: str) -> None:
    two = written(name, OSLO, ("now", {}))
    assert accepts(grammar_of(name), two)
    assert not accepts(grammar_of(name, several=False), two)
    assert accepts(grammar_of(name, required=False), two)
    assert not accepts(grammar_of(name, required=False, several=False), two)


def test_an_end_of_the_answer_that_ends_calls_leaves_room_for_one() -> None:
    assert not accepts(grammar_of("gpt_oss"), written("gpt_oss", OSLO, ("now", {})))


@pytest.mark.parametrize("name", [name for name in TOOL_FORMATS if name != "gpt_oss"])
def test_free_text_may_call_and_then_keeps_to_the_schema(name: str) -> None:
    grammar = grammar_of(name, required=False)
    call = written(name, OSLO)
    for text in (
        "",
        "Hello <think> [x] {y}",
        call,
        f"Let me look. {call}",
        f"{call}\n\nThere.",
        f"a {call} b {call} c",
    ):
        assert accepts(grammar, text), text
    assert not accepts(grammar, begun(name) + written(name, ("get_weather", {"city": "Oslo", "exact": "yes"})))


@pytest.mark.parametrize("name", TOOL_FORMATS)
def test_whatever_is_let_through_is_read_as_calls_of_the_schema(name: str) -> None:
    grammar = grammar_of(name, several=False)
    ended = [text for seed in range(12) if (text := sample_answer(grammar, seed)) is not None]
    assert len(ended) > 4
    for text in ended:
        [call] = calls_in(name, text)
        assert call.complete
        arguments = json.loads(call.arguments)
        assert is_weather(arguments) if call.name == "get_weather" else (call.name, arguments) == ("now", {}), text


@pytest.mark.parametrize("name", ["qwen3_coder", "glm"])
@pytest.mark.parametrize("value", ["a\nb", "<p>", "true", "3", '"quoted"', "{}"])
def test_strings_as_they_are_come_back_as_strings(name: str, value: str) -> None:
    text = written(name, ("get_weather", {"city": value, "exact": True}))
    assert accepts(grammar_of(name), text)
    assert json.loads(calls_in(name, text)[0].arguments)["city"] == value


@pytest.mark.parametrize("value", ["a\n<parameter=unit>\n", "a\n</function>", "a</parameter>b"])
def test_no_string_ends_before_its_end(value: str) -> None:
    text = written("qwen3_coder", ("get_weather", {"city": value, "exact": True}))
    assert not accepts(grammar_of("qwen3_coder", (ToolSpec("get_weather", {"properties": {"city": {}}}),)), text)


def test_a_grammar_reads_as_the_notation_does() -> None:
    tool = ToolSpec("now", {"type": "object", "properties": {}, "additionalProperties": False})
    begin, end = tokens().added["<tool_call>"], tokens().added["</tool_call>"]
    assert grammar_of("hermes", (tool,), several=False).text == (
        "start: rule_2\n"
        'rule_1: %json {"x-guidance":{"whitespace_pattern":" |\\\\r?\\\\n[ \\\\t]{0,32}","lenient":true},'
        '"type":"object","properties":{},"additionalProperties":false}\n'
        f'rule_2: (<[{begin}]> "\\n{{\\"name\\": \\"now\\", \\"arguments\\": " rule_1 "}}\\n" <[{end}]>) \n'
    )


def strict(**properties: Any) -> tuple[ToolSpec, ...]:
    schema = {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}
    return (ToolSpec("f", schema, strict=True),)


def test_a_strict_tool_keeps_openais_rules_and_others_need_not() -> None:
    loose = {"type": "object", "properties": {"a": {"type": "string", "format": "color"}}}
    assert accepts(grammar_of("hermes", (ToolSpec("f", loose),)), written("hermes", ("f", {"a": "red"})))
    with pytest.raises(BadRequestError, match="'color'"):
        grammar_of("hermes", strict(a={"type": "string", "format": "color"}))
    with pytest.raises(BadRequestError, match="additionalProperties"):
        grammar_of("hermes", (ToolSpec("f", loose, strict=True),))


@pytest.mark.parametrize("pattern", [r"^(?!\.)[0-9.]+$", r"(?<=x)y", r"\bx\b", r"(x)\1"])
def test_a_pattern_that_is_not_regular_binds_strict_tools_only(pattern: str) -> None:
    value = {"type": "string", "pattern": pattern, "maxLength": 3}
    loose = ToolSpec("f", {"type": "object", "properties": {"a": value}, "required": ["a"]})
    grammar = grammar_of("hermes", (loose,))
    assert accepts(grammar, written("hermes", ("f", {"a": "any"})))
    assert not accepts(grammar, written("hermes", ("f", {"a": "long"})))
    with pytest.raises(BadRequestError, match=r"Tool 'f': The 'pattern' at 'tools\.properties\.a' cannot be enforced"):
        grammar_of("hermes", strict(a=value))


def test_arguments_that_stand_for_themselves_are_refused() -> None:
    loop = {"type": "object", "properties": {"a": {"$ref": "#/$defs/b"}}, "$defs": {"b": {"$ref": "#/$defs/b"}}}
    with pytest.raises(BadRequestError, match="leads back") as error:
        grammar_of("hermes", (ToolSpec("f", loop),))
    assert error.value.param == "tools"


@pytest.mark.parametrize("name", ["qwen3_coder", "glm"])
def test_what_a_notation_cannot_enforce_is_refused_for_strict_tools(name: str) -> None:
    with pytest.raises(BadRequestError, match="'pattern'"):
        grammar_of(name, strict(a={"type": "string", "pattern": "^x$"}))
    assert accepts(
        grammar_of("hermes", strict(a={"type": "string", "pattern": "^x$"})), written("hermes", ("f", {"a": "x"}))
    )


@pytest.mark.parametrize(
    "parameters",
    [
        {"properties": ["a"]},
        {"properties": {"a": {}}, "required": 3},
        {"properties": {"a\n": {}}},
        {"properties": {"<a>": {}}},
    ],
)
def test_parameters_that_cannot_be_written_are_refused(parameters: dict[str, Any]) -> None:
    for name in ("qwen3_coder", "llama_pythonic"):
        with pytest.raises(BadRequestError) as error:
            grammar_of(name, (ToolSpec("f", parameters),))
        assert error.value.param == "tools"


def test_no_bound_of_a_schema_becomes_part_of_the_grammar() -> None:
    tool = ToolSpec("f", {"properties": {"a": {"type": "string", "minLength": "0}/ evil: /", "maxLength": 4}}})
    assert "evil" not in grammar_of("qwen3_coder", (tool,)).text


OTHERWISE = {
    "deepseek_v3": '<｜tool▁call▁begin｜>function<｜tool▁sep｜>now\n```json\n{"x": 1}\n```<｜tool▁call▁end｜>',
    "deepseek_v31": '<｜tool▁call▁begin｜>now<｜tool▁sep｜>{"x": 1}<｜tool▁call▁end｜>',
    "generic": '{"arguments": {"x": 1}, "name": "now"}',
    "kimi_k2": '<|tool_call_begin|>functions.now:0<|tool_call_argument_begin|>{"x": 1}<|tool_call_end|>',
    "llama3_json": '{ "type": "function", "name": "now", "parameters": {"x": 1}}',
    "llama_pythonic": "[ now(x=1)]",
    "phi4_mini": 'functools[{"name": "now", "arguments": {"x": 1}}]',
    "granite": '<tool_call>[{"name": "now", "arguments": {"x": 1}}]',
    "glm4": 'now\n{"x": 1}',
    "deepseek_v32": '<｜DSML｜invoke name="now"><｜DSML｜parameter name="x">1</｜DSML｜parameter></｜DSML｜invoke>',
    "seed_oss": "<seed:tool_call><function=now>\n<parameter=x>1</parameter>\n</function></seed:tool_call>",
    "step3": (
        '<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="now">'
        '<steptml:parameter name="x">1</steptml:parameter></steptml:invoke><｜tool_call_end｜>'
    ),
    "internlm": '<|action_start|><|plugin|>[{"name": "now", "parameters": {"x": 1}}]<|action_end|>',
    "lfm2": "<|tool_call_start|> [now(x=1)]<|tool_call_end|>",
    "olmo3": "<function_calls>\nnow(x=1)</function_calls>",
    "gemma4": '<|tool_call>call:now{"x": 1}<tool_call|>',
    "apertus": '<|tools_prefix|>{"now": {"x": 1}}<|tools_suffix|>',
    "qwen3_coder": "<function=now>\n<parameter=x>\n1\n</parameter>\n</function>",
}
"""Calls outside the schema, as parsed from deviating spellings."""


@pytest.mark.parametrize("name", OTHERWISE)
def test_no_call_slips_through_free_text_in_another_spelling(name: str) -> None:
    assert [call.name for call in calls_in(name, OTHERWISE[name])] == ["now"]
    grammar = grammar_of(name, required=False)
    assert not accepts(grammar, OTHERWISE[name])
    assert not accepts(grammar, begun(name) + OTHERWISE[name])
    assert accepts(grammar, 'Plain words, (brackets), [1, 2], {"other": 3} and "quotes": ok.')


def test_no_call_slips_through_harmonys_final_message() -> None:
    grammar = grammar_of("gpt_oss", required=False, thinking=Thinking(framing=HARMONY, opened=False))
    final = "<|channel|>final<|message|>Hello"
    assert accepts(grammar, final)
    call = '<|channel|>commentary to=functions.now<|message|>{"x":1}'
    assert not accepts(grammar, f"{final}<|end|><|start|>assistant{call}")


@pytest.mark.parametrize("name", ["hermes", "glm", "qwen3_coder", "llama_pythonic"])
def test_an_empty_string_may_be_among_the_values(name: str) -> None:
    tool = ToolSpec("f", {"properties": {"a": {"enum": ["", "x"]}}, "required": ["a"]})
    grammar = grammar_of(name, (tool,))
    assert accepts(grammar, written(name, ("f", {"a": ""})))
    assert not accepts(grammar, written(name, ("f", {"a": "y"})))


def test_only_we_guide_the_grammar() -> None:
    loose = ToolSpec("f", {"type": "object", "x-guidance": "mine"})
    assert "mine" not in grammar_of("hermes", (loose,)).text
    with pytest.raises(BadRequestError, match="'type' 'object'"):
        grammar_of("hermes", (ToolSpec("f", {"type": "string"}),))


@pytest.mark.parametrize("name", ["glm", "qwen3_coder"])
def test_an_argument_that_is_defined_by_itself_is_text(name: str) -> None:
    looks = 0

    class Watched(dict[str, Any]):
        def get(self, key: str, default: Any = None) -> Any:
            nonlocal looks
            looks += 1
            return super().get(key, default)

    argument = Watched(anyOf=[Watched({"$ref": "#/properties/x"}) for _ in range(24)])
    tool = ToolSpec("f", {"properties": Watched(x=argument), "required": ["x"]})
    grammar = grammar_of(name, (tool,))
    assert looks < 1_000
    assert accepts(grammar, written(name, ("f", {"x": "any words"})))
