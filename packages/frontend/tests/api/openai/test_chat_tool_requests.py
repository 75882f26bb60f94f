"""Tools in chat requests: in the prompt, in constraints, and in refusals."""

import json
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from packages.frontend.tests.api.openai.tool_chat import (
    BODY,
    CALL,
    NOW,
    WEATHER,
    EngineOf,
    HttpOf,
    OpenAIOf,
    Streamed,
    pairs,
    prompt_of,
    saying,
    stream_of,
    tool_engine,
)
from tercet.frontend.config.config import ServingConfig
from tercet.frontend.testing import FakeEngine, serving
from tercet.protocol.messages.values import GrammarKind, ModelLimits, unpack_ints


@pytest.fixture
def model_saying(engine_of: EngineOf, files: dict[str, bytes], limits: ModelLimits) -> Callable[..., FakeEngine]:
    return partial(tool_engine, engine_of, files, limits)


CITY = {**WEATHER["function"]["parameters"], "additionalProperties": False}
NAMED = {"type": "function", "function": {"name": "now"}}
ALLOWED = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [NAMED]}}


@pytest.mark.parametrize(
    ("options", "allowed", "finish"),
    [
        ({"tool_choice": "required"}, {"get_weather", "now"}, "tool_calls"),
        ({"tool_choice": NAMED}, {"now"}, "stop"),
        ({"tool_choice": ALLOWED}, {"now"}, "tool_calls"),
    ],
    ids=["required", "named", "allowed"],
)
async def test_a_choice_that_requires_calls_is_a_grammar(
    model_saying: EngineOf, openai_of: OpenAIOf, options: dict[str, Any], allowed: set[str], finish: str
) -> None:
    call = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
    async with serving(model_saying(saying(call))) as served:
        answer = await openai_of(served).chat.completions.create(**{**BODY, **options})
        chunks = await stream_of(openai_of(served), **options)
        request = served.engine.requests()[0]
    assert request.sampling.grammar is not None
    assert request.sampling.grammar.kind is GrammarKind.LARK
    assert {name for name in ("get_weather", "now") if f'\\"{name}\\"' in request.sampling.grammar.text} == allowed
    assert answer.choices[0].finish_reason == finish
    assert Streamed(chunks).finishes == [finish]


@pytest.mark.parametrize(("choice", "calls"), [(NAMED, 1), ("required", 2)], ids=["named", "required"])
async def test_a_tool_that_is_named_is_called_exactly_once(
    model_saying: EngineOf, openai_of: OpenAIOf, choice: object, calls: int
) -> None:
    now = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>\n'
    function = {**NOW["function"], "type": "function"}
    chosen = {"type": "function", "name": "now"} if choice == NAMED else choice
    async with serving(model_saying(saying(now * 2))) as served:
        client: Any = openai_of(served)
        answer = await client.chat.completions.create(**{**BODY, "tool_choice": choice})
        await client.chat.completions.create(**{**BODY, "tool_choice": choice, "parallel_tool_calls": False})
        response = await client.responses.create(model="tiny", input="?", tools=[function], tool_choice=chosen)
        free, one, other = (request.sampling.grammar for request in served.engine.requests())
    assert len(answer.choices[0].message.tool_calls) == calls
    assert [item.type for item in response.output] == ["function_call"] * calls
    assert (free == one) is (calls == 1)
    assert (other == one) is (calls == 1)


async def test_allowed_tools_are_all_described_and_some_can_be_called(
    model_saying: EngineOf, openai_of: OpenAIOf
) -> None:
    choice = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [NAMED]}}
    async with serving(model_saying(saying("x"))) as served:
        await openai_of(served).chat.completions.create(**{**BODY, "tool_choice": choice})
        [request] = served.engine.requests()
        assert "get_weather" in prompt_of(served, request)
    assert request.sampling.grammar is not None
    assert "get_weather" not in request.sampling.grammar.text


async def test_no_choice_is_no_tools(model_saying: EngineOf, openai_of: OpenAIOf) -> None:
    async with serving(model_saying(saying(CALL))) as served:
        answer = await openai_of(served).chat.completions.create(**{**BODY, "tool_choice": "none"})
        [request] = served.engine.requests()
        assert "<tools>" not in prompt_of(served, request)
    assert answer.choices[0].message.tool_calls is None
    assert answer.choices[0].message.content == CALL


async def test_a_strict_tool_is_a_grammar_even_where_calls_are_free(
    model_saying: EngineOf, openai_of: OpenAIOf, http_of: HttpOf
) -> None:
    schema: dict[str, Any] = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    strict = {"type": "function", "function": {"name": "f", "parameters": schema, "strict": True}}
    async with serving(model_saying(saying("x"))) as served:
        refused = await http_of(served).post("/v1/chat/completions", json={**BODY, "tools": [strict]})
        schema["additionalProperties"] = False
        await openai_of(served).chat.completions.create(**{**BODY, "tools": [strict]})
        [request] = served.engine.requests()
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "tools[0].function.parameters")
    assert request.sampling.grammar is not None
    assert "(?s:.*)" in request.sampling.grammar.text


async def test_a_format_beside_tools_is_an_alternative(model_saying: EngineOf, openai_of: OpenAIOf) -> None:
    async with serving(model_saying(saying('{"a": 1}'))) as served:
        options = {**BODY, "response_format": {"type": "json_object"}}
        answer = await openai_of(served).chat.completions.create(**options)
        [request] = served.engine.requests()
    assert answer.choices[0].message.content == '{"a": 1}'
    assert request.sampling.grammar is not None
    assert [each["name"] for each in json.loads(request.sampling.grammar.text)["grammars"]] == ["turn", "tercet"]


async def test_a_result_answers_a_call_in_the_next_turn(model_saying: EngineOf, openai_of: OpenAIOf) -> None:
    async with serving(model_saying(saying(CALL))) as served:
        client = openai_of(served)
        answer = await client.chat.completions.create(**BODY)
        said = answer.choices[0].message
        assert said.tool_calls is not None
        result = {"role": "tool", "tool_call_id": said.tool_calls[0].id, "content": "Rain <|im_end|>"}
        messages = [*BODY["messages"], said.model_dump(), result]
        await client.chat.completions.create(**{**BODY, "messages": messages})
        _, request = served.engine.requests()
        text = prompt_of(served, request)
        ids = list(unpack_ints(request.input_ids))
        [model] = served.manager.models
        end = model.tokens.added["<|im_end|>"]
    assert '<tool_call>{"name": "get_weather", "arguments": {"city": "Oslo"}}</tool_call><|im_end|>' in text
    assert "<|im_start|>tool\nRain <|im_end|>" in text
    assert ids.count(end) == 3  # a result cannot end its own message


async def test_what_clients_make_of_an_answer_comes_back_with_it(model_saying: EngineOf, openai_of: OpenAIOf) -> None:
    tool = {"type": "function", "function": {**WEATHER["function"], "strict": True, "parameters": CITY}}
    options: dict[str, Any] = {**BODY, "tools": [tool]}
    async with serving(model_saying(saying(CALL))) as served:
        client = openai_of(served)
        whole = await client.chat.completions.parse(**options)
        async with client.chat.completions.stream(**options) as stream:
            streamed = await stream.get_final_completion()
        for said in (whole.choices[0].message, streamed.choices[0].message):
            assert said.tool_calls is not None
            assert said.tool_calls[0].function.parsed_arguments == {"city": "Oslo"}
            result = {"role": "tool", "tool_call_id": said.tool_calls[0].id, "content": "Rain"}
            await client.chat.completions.parse(**{**options, "messages": [*BODY["messages"], said, result]})
        *_, first, second = served.engine.requests()
        texts = [prompt_of(served, request) for request in (first, second)]
    assert '"arguments": {"city": "Oslo"}}</tool_call>' in texts[0]
    assert texts[0] == texts[1]


async def test_litellms_own_fields_come_back_with_its_message(model_saying: EngineOf, openai_of: OpenAIOf) -> None:
    async with serving(model_saying(saying(CALL))) as served:
        client = openai_of(served)
        answer = await client.chat.completions.create(**BODY)
        said = answer.choices[0].message.model_dump(exclude_none=True)
        result = {"role": "tool", "tool_call_id": said["tool_calls"][0]["id"], "content": "Rain"}
        for more in ({}, {"function_call": None, "provider_specific_fields": {"refusal": None}}):
            messages: Any = [*BODY["messages"], {**said, **more}, result]
            await client.chat.completions.create(**{**BODY, "messages": messages})
        _, plain, marked = served.engine.requests()
        assert prompt_of(served, plain) == prompt_of(served, marked)


async def test_a_model_without_a_notation_is_told_of_tools_in_words(
    engine_of: EngineOf, openai_of: OpenAIOf, limits: Any
) -> None:
    import msgspec

    roomy = msgspec.structs.replace(limits, context_length=2048)
    call = '[{"name": "get_weather", "arguments": {"city": "Oslo"}}]'
    async with serving(engine_of(saying(call), limits=roomy)) as served:
        answer = await openai_of(served).chat.completions.create(**BODY)
        [request] = served.engine.requests()
        assert '{"name": "get_weather", "description": "Weather of a city"' in prompt_of(served, request)
    assert pairs(answer.choices[0].message) == [("get_weather", '{"city": "Oslo"}')]


USER = {"role": "user", "content": "x"}
BAD_CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a":' * 70 + "1" + "}" * 70}}


@pytest.mark.parametrize(
    ("asked", "param"),
    [
        ({"tool_choice": {"type": "function", "function": {"name": "unknown"}}}, "tool_choice"),
        ({"tool_choice": "required", "tools": []}, "tool_choice"),
        ({"tool_choice": "sometimes"}, "tool_choice"),
        ({"tools": [WEATHER, WEATHER]}, "tools"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"type": "function", "function": {"name": "no spaces"}}]}, "tools[0].function.name"),
        ({"tools": [{"type": "function", "function": {"name": "f", "more": 1}}]}, "tools[0].function.more"),
        ({"tools": [NOW] * 129}, "tools"),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"tools": None, "functions": [{"name": "f"}, {"name": "f"}]}, "functions"),
        ({"tools": None, "functions": [{"name": "f"}], "function_call": {"name": "g"}}, "function_call"),
        ({"function_call": "none"}, "function_call"),
        ({"function_call": {"name": "now"}}, "function_call"),
        ({"tools": None, "function_call": {"name": "now"}}, "function_call"),
        ({"tools": None, "functions": [{"name": "f"}], "tool_choice": "required"}, "tool_choice"),
        ({"tools": None, "functions": [{"name": "now"}], "tool_choice": NAMED}, "tool_choice"),
        ({"messages": [USER, {"role": "tool", "content": "x"}]}, "messages[1].tool_call_id"),
        ({"messages": [USER, {"role": "tool", "content": "x", "tool_call_id": "1"}]}, "messages[1].tool_call_id"),
        (
            {"messages": [{"role": "assistant", "tool_calls": [BAD_CALL]}]},
            "messages[0].tool_calls[0].function.arguments",
        ),
        ({"messages": [{"role": "assistant"}]}, "messages[0].content"),
    ],
)
async def test_what_cannot_be_meant_is_refused_by_name(
    model_saying: EngineOf, http_of: HttpOf, asked: dict[str, Any], param: str
) -> None:
    async with serving(model_saying(saying("x"))) as served:
        answer = await http_of(served).post("/v1/chat/completions", json={**BODY, **asked})
        assert served.engine.requests() == []
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param


async def test_tools_nested_without_end_are_refused(model_saying: EngineOf, http_of: HttpOf) -> None:
    deep: dict[str, Any] = {}
    for _ in range(90):
        deep = {"properties": deep}
    tool = {"type": "function", "function": {"name": "f", "parameters": deep}}
    async with serving(model_saying(saying("x"))) as served:
        answer = await http_of(served).post("/v1/chat/completions", json={**BODY, "tools": [tool]})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "tools"


async def test_a_server_told_to_read_no_calls_says_so(model_saying: EngineOf, http_of: HttpOf) -> None:
    async with serving(model_saying(saying("x")), config=ServingConfig(tool_call_parser="none")) as served:
        answer = await http_of(served).post("/v1/chat/completions", json=BODY)
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "unsupported_parameter")


@pytest.mark.parametrize("pattern", ["(a", "(?=x)y"])
async def test_a_pattern_that_no_grammar_can_hold_is_refused(
    model_saying: EngineOf, http_of: HttpOf, pattern: str
) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "string", "pattern": pattern}}}
    strict = {**schema, "required": ["a"], "additionalProperties": False}
    tool = {"type": "function", "function": {"name": "f", "parameters": strict, "strict": True}}
    async with serving(model_saying(saying("x"))) as served:
        answer = await http_of(served).post("/v1/chat/completions", json={**BODY, "tools": [tool]})
        assert served.engine.requests() == []
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "tools[0].function.parameters")
