"""Custom tools in chats through OpenAI's client: text in, text out, with any notation of the model."""

import json
from collections.abc import Callable
from functools import partial
from typing import Any

import openai
import pytest
from openai.types.chat import ChatCompletionChunk, ChatCompletionMessage

from packages.frontend.tests.api.openai.tool_chat import (
    BODY,
    WEATHER,
    EngineOf,
    HttpOf,
    OpenAIOf,
    prompt_of,
    saying,
    tool_engine,
)
from tercet.frontend.config.config import ServingConfig
from tercet.frontend.testing import FakeEngine, serving
from tercet.protocol.messages.values import ModelLimits

INPUT = 'print("hé 😀")\n\td = {"a": \'\\d+\'}\n'
PYTHON: dict[str, Any] = {"type": "custom", "custom": {"name": "python", "description": "Runs Python."}}
NAMED: dict[str, Any] = {"type": "custom", "custom": {"name": "python"}}
ASKED: dict[str, Any] = {**BODY, "tools": [WEATHER, PYTHON], "max_tokens": 1000}


def shaped(syntax: str, definition: str, name: str = "python") -> dict[str, Any]:
    grammar = {"syntax": syntax, "definition": definition}
    return {"type": "custom", "custom": {"name": name, "format": {"type": "grammar", "grammar": grammar}}}


def hermes(arguments: str, name: str = "python") -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def harmony(content: str) -> str:
    return f"<|channel|>commentary to=functions.python <|constrain|>json<|message|>{content}<|call|>"


WRITTEN = json.dumps({"input": INPUT})
NOTATIONS = {
    "hermes": hermes(WRITTEN),
    "gpt_oss": harmony(WRITTEN),
    "qwen3_coder": f"<tool_call>\n<function=python>\n<parameter=input>\n{INPUT}\n</parameter>\n</function></tool_call>",
    "glm": f"<tool_call>python\n<arg_key>input</arg_key>\n<arg_value>{INPUT}</arg_value>\n</tool_call>",
    "llama_pythonic": f"[python(input={INPUT!r})]",
}


@pytest.fixture
def model_saying(engine_of: EngineOf, files: dict[str, bytes], limits: ModelLimits) -> Callable[..., FakeEngine]:
    return partial(tool_engine, engine_of, files, limits)


def called(message: ChatCompletionMessage) -> list[tuple[str, str]]:
    calls = message.tool_calls or []
    assert len({call.id for call in calls}) == len(calls)
    return [
        (call.custom.name, call.custom.input)
        if call.type == "custom"
        else (call.function.name, call.function.arguments)
        for call in calls
    ]


def added_up(chunks: list[ChatCompletionChunk]) -> list[dict[str, Any]]:
    """Return the calls of a stream, merged as clients do."""
    calls: list[dict[str, Any]] = []
    for delta in (each for chunk in chunks for each in chunk.choices[0].delta.tool_calls or ()):
        told = delta.to_dict()
        inner: Any = told["custom" if "custom" in told else "function"]
        if "id" in told:
            assert delta.index == len(calls)
            calls.append({"id": told["id"], "type": told["type"], **inner})
        else:
            [(field, text)] = inner.items()
            assert text
            calls[delta.index][field] += text
    return calls


async def streamed(client: openai.AsyncOpenAI, **asked: Any) -> list[ChatCompletionChunk]:
    stream = await client.chat.completions.create(**{**ASKED, "stream": True, **asked})
    return [chunk async for chunk in stream]


@pytest.mark.parametrize("size", [1, 7, 4096])
@pytest.mark.parametrize("name", NOTATIONS)
async def test_a_call_is_a_text_in_every_kind_of_notation(
    model_saying: EngineOf, openai_of: OpenAIOf, name: str, size: int
) -> None:
    config = ServingConfig(tool_call_parser=name)
    async with serving(model_saying(saying(NOTATIONS[name], size=size)), config=config) as served:
        answer = await openai_of(served).chat.completions.create(**ASKED)
        chunks = await streamed(openai_of(served, strict=False))
    [choice] = answer.choices
    assert (choice.message.content, choice.finish_reason) == (None, "tool_calls")
    assert called(choice.message) == [("python", INPUT)]
    [call] = added_up(chunks)
    assert call.pop("id").startswith("call_")
    assert call == {"type": "custom", "name": "python", "input": INPUT}
    assert chunks[-1].choices[0].finish_reason == "tool_calls"


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        (hermes('{"patch": "x", "why": 1}'), '{"patch": "x", "why": 1}'),
        (hermes('"*** Begin Patch\\n"'), "*** Begin Patch\n"),
        (hermes("[1, 2]"), "[1, 2]"),
        (hermes("{}"), ""),
        (hermes('{"input": "a\\ud800\\q"}'), "a\ufffd\\q"),
        (harmony("*** Begin Patch\n{"), "*** Begin Patch\n{"),
        (harmony('import os\nprint("hi")\n'), 'import os\nprint("hi")\n'),
        (harmony("[x for x in y]"), "[x for x in y]"),
        (harmony('{"a": 1}["a"]'), '{"a": 1}["a"]'),
        (harmony('"a" + "b"'), '"a" + "b"'),
    ],
)
async def test_arguments_that_are_no_input_are_given_as_they_are(
    model_saying: EngineOf, openai_of: OpenAIOf, said: str, expected: str
) -> None:
    config = ServingConfig(tool_call_parser="gpt_oss" if said.startswith("<|") else "hermes")
    async with serving(model_saying(saying(said, size=3)), config=config) as served:
        answer = await openai_of(served).chat.completions.create(**ASKED)
        chunks = await streamed(openai_of(served, strict=False))
    assert answer.choices[0].message.content is None
    assert called(answer.choices[0].message) == [("python", expected)]
    assert [call["input"] for call in added_up(chunks)] == [expected]


async def test_functions_beside_a_custom_tool_keep_their_arguments(model_saying: EngineOf, openai_of: OpenAIOf) -> None:
    said = "\n".join([hermes('{"input": "a"}', "get_weather"), hermes('{"input": "b"}'), hermes("{}", "get_weather")])
    async with serving(model_saying(saying(said))) as served:
        answer = await openai_of(served).chat.completions.create(**ASKED)
        chunks = await streamed(openai_of(served, strict=False))
    expected = [("get_weather", '{"input": "a"}'), ("python", "b"), ("get_weather", "{}")]
    assert called(answer.choices[0].message) == expected
    assert [(call["name"], call.get("input", call.get("arguments"))) for call in added_up(chunks)] == expected


async def test_a_call_that_is_cut_off_tells_what_there_was(model_saying: EngineOf, openai_of: OpenAIOf) -> None:
    async with serving(model_saying(saying(hermes('{"input": "one\\ntwo"}'), size=1))) as served:
        for expected, begun in (("one", '{"input": "one\\'), ("one\nt", '{"input": "one\\nt'), ("", '{"inp')):
            tokens = len(hermes(begun).removesuffix("}\n</tool_call>"))
            answer = await openai_of(served).chat.completions.create(**{**ASKED, "max_tokens": tokens})
            chunks = await streamed(openai_of(served, strict=False), max_tokens=tokens)
            assert answer.choices[0].finish_reason == "length"
            assert called(answer.choices[0].message) == [("python", expected)]
            assert [call["input"] for call in added_up(chunks)] == [expected]


async def test_a_model_is_told_of_a_function_with_an_input(model_saying: EngineOf, openai_of: OpenAIOf) -> None:
    lark = 'start: "a"+'
    async with serving(model_saying(saying("x"))) as served:
        await openai_of(served).chat.completions.create(**ASKED)
        plain = prompt_of(served)
        await openai_of(served).chat.completions.create(**{**ASKED, "tools": [shaped("lark", lark)]})
        grammatical = prompt_of(served)
        requests = served.engine.requests()
    schema = '"parameters": {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]'
    assert f'"name": "python", "description": "Runs Python.", {schema}' in plain
    assert json.dumps(lark)[1:-1] in grammatical
    assert schema in grammatical
    assert [request.sampling.grammar for request in requests] == [None, None]


async def test_a_call_and_its_result_come_back_as_the_model_made_them(
    model_saying: EngineOf, openai_of: OpenAIOf
) -> None:
    async with serving(model_saying(saying(NOTATIONS["hermes"]))) as served:
        client = openai_of(served)
        said = (await client.chat.completions.create(**ASKED)).choices[0].message
        assert said.tool_calls is not None
        result = {"role": "tool", "tool_call_id": said.tool_calls[0].id, "content": "done"}
        snapshot = {**said.to_dict(), "tool_calls": [{**said.tool_calls[0].to_dict(), "index": 0, "function": None}]}
        for message in (said, said.model_dump(), said.to_dict(), snapshot):  # the result of the client's merge
            messages: Any = [*BODY["messages"], message, result]
            await client.chat.completions.create(**{**ASKED, "messages": messages})
            text = prompt_of(served)
            [call] = [line for line in text.splitlines() if "<tool_call>" in line]
            written = call.partition("<tool_call>")[2].partition("</tool_call>")[0]
            assert json.loads(written) == {"name": "python", "arguments": {"input": INPUT}}
            assert "<|im_start|>tool\ndone" in text


@pytest.mark.parametrize(
    ("choice", "finish", "told"),
    [
        (NAMED, "stop", ["python"]),
        ("required", "tool_calls", ["get_weather", "python"]),
        ({"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [NAMED]}}, "tool_calls", ["python"]),
    ],
    ids=["named", "required", "allowed"],
)
async def test_a_custom_tool_can_be_chosen(
    model_saying: EngineOf, openai_of: OpenAIOf, choice: Any, finish: str, told: list[str]
) -> None:
    async with serving(model_saying(saying(hermes('{"input": "a"}')))) as served:
        answer = await openai_of(served).chat.completions.create(**{**ASKED, "tool_choice": choice})
        [request] = served.engine.requests()
    assert answer.choices[0].finish_reason == finish
    assert request.sampling.grammar is not None
    assert [name for name in ("get_weather", "python") if name in request.sampling.grammar.text] == told


async def test_a_regular_expression_is_enforced(model_saying: EngineOf, openai_of: OpenAIOf) -> None:
    async with serving(model_saying(saying(hermes('{"input": "42"}')))) as served:
        answer = await openai_of(served).chat.completions.create(**{**ASKED, "tools": [shaped("regex", "[0-9]+")]})
        [request] = served.engine.requests()
    assert called(answer.choices[0].message) == [("python", "42")]
    assert request.sampling.grammar is not None
    assert "^(?:[0-9]+)$" in request.sampling.grammar.text


WRONG = "tools[0].custom.format.grammar.definition"


@pytest.mark.parametrize(
    ("asked", "param"),
    [
        ({"tools": [shaped("lark", "start: missing")]}, WRONG),
        ({"tools": [shaped("lark", "start: missing")], "tool_choice": "none"}, WRONG),
        ({"tools": [shaped("lark", '{"grammars": []}')]}, WRONG),
        ({"tools": [shaped("lark", "start: " + '"é"' * 40_000)]}, WRONG),
        ({"tools": [shaped("regex", "(a")]}, WRONG),
        ({"tools": [shaped("regex", "(?=a)b")]}, WRONG),
        ({"tools": [shaped("regex", "(a")], "tool_choice": "none"}, WRONG),
        ({"tools": [shaped("gbnf", "root ::= x")]}, "tools[0].custom.format.grammar.syntax"),
        ({"tools": [shaped("regex", "")]}, WRONG),
        ({"tools": [shaped("regex", "a" * 200_000)]}, WRONG),
        ({"tools": [shaped("lark", 'start: "a"', f"t{place}") for place in range(33)]}, "tools"),
        ({"tools": [PYTHON, PYTHON]}, "tools"),
        ({"tools": [PYTHON, {"type": "function", "function": {"name": "python"}}]}, "tools"),
        ({"tools": [PYTHON] * 129}, "tools"),
        ({"tools": [{"type": "custom", "custom": {"name": "no spaces"}}]}, "tools[0].custom.name"),
        ({"tools": [{"type": "custom", "custom": {"name": "a", "strict": True}}]}, "tools[0].custom.strict"),
        ({"tools": [{"type": "custom", "function": {"name": "a"}}]}, "tools[0].custom"),
        ({"tool_choice": {"type": "custom", "custom": {"name": "perl"}}}, "tool_choice"),
        ({"tool_choice": {"type": "custom", "custom": {"name": "get_weather"}}}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "python"}}}, "tool_choice"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"id": "1", "type": "custom"}]}]}, "messages[0]"),
    ],
)
async def test_what_cannot_be_meant_is_refused_by_its_place(
    model_saying: EngineOf, http_of: HttpOf, asked: dict[str, Any], param: str
) -> None:
    async with serving(model_saying(saying("x"))) as served:
        answer = await http_of(served).post("/v1/chat/completions", json={**ASKED, **asked})
        assert served.engine.requests() == []
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"].startswith(param)


async def test_tokenize_counts_custom_tools(model_saying: EngineOf, http_of: HttpOf, openai_of: OpenAIOf) -> None:
    body = {"model": "tiny", "messages": BODY["messages"], "tools": ASKED["tools"]}
    async with serving(model_saying(saying("x"))) as served:
        counted = await http_of(served).post("/tokenize", json=body)
        answer = await openai_of(served).chat.completions.create(**ASKED)
    assert answer.usage is not None
    assert counted.json()["count"] == answer.usage.prompt_tokens
