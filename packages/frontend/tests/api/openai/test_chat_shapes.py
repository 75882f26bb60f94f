"""Requests of agents at models whose templates refuse a part of them: they are answered, and no text is lost."""

import json
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from packages.frontend.tests.api.openai.tool_chat import EngineOf, HttpOf, prompt_of, saying, tool_engine
from packages.frontend.tests.chat.tool_templates import MISTRAL
from packages.frontend.tests.model.template_shapes import NO_SYSTEM, ONE_CALL, SYSTEM_FIRST
from tercet.frontend.model.message_shape import short_id
from tercet.frontend.testing import FakeEngine, serving
from tercet.protocol.messages.values import ModelLimits

TOOL = {"type": "function", "function": {"name": "now", "description": "Tell the time", "parameters": {}}}


@pytest.fixture
def model_of(engine_of: EngineOf, files: dict[str, bytes], limits: ModelLimits) -> Callable[..., FakeEngine]:
    return partial(tool_engine, engine_of, files, limits, saying("So."))


async def prompt(model: FakeEngine, http_of: HttpOf, path: str, body: dict[str, Any]) -> str:
    async with serving(model) as served:
        answer = await http_of(served).post(path, json={"model": "tiny", **body})
        assert answer.status_code == 200, answer.text
        [request] = served.engine.requests()
        return prompt_of(served, request)


def said(role: str, content: str) -> dict[str, Any]:
    return {"role": role, "content": content}


def loop(*call_ids: str) -> list[dict[str, Any]]:
    function = {"name": "now", "arguments": "{}"}
    calls = [{"id": call_id, "type": "function", "function": function} for call_id in call_ids]
    results = [{"role": "tool", "tool_call_id": call_id, "content": f"noon {call_id}"} for call_id in call_ids]
    return [said("user", "Time?"), {"role": "assistant", "content": None, "tool_calls": calls}, *results]


async def test_system_messages_of_claude_code_are_folded(model_of: EngineOf, http_of: HttpOf) -> None:
    turns = [said("user", "a"), said("system", "later"), said("assistant", "b"), said("user", "c")]
    body = {"system": [{"type": "text", "text": "first"}], "messages": turns, "max_tokens": 9}
    text = await prompt(model_of(template=SYSTEM_FIRST), http_of, "/v1/messages", body)
    assert text == "<system>first\n\nlater<user>a<assistant>b<user>c"


async def test_tools_are_in_the_turn_of_the_user_without_a_system_role(model_of: EngineOf, http_of: HttpOf) -> None:
    body = {"messages": [said("user", "Time?")], "tools": [TOOL]}
    text = await prompt(model_of(template=NO_SYSTEM), http_of, "/v1/chat/completions", body)
    assert text.startswith("<user>You can call these tools:\n")
    assert "Tell the time" in text
    assert text.endswith("\n\nTime?")


async def test_a_loop_goes_on_where_the_template_has_no_tools(model_of: EngineOf, http_of: HttpOf) -> None:
    body = {"messages": [said("system", "Be kind."), *loop("call_1", "call_2")], "tools": [TOOL]}
    text = await prompt(model_of(template=NO_SYSTEM), http_of, "/v1/chat/completions", body)
    calls = '[{"name": "now", "arguments": {}}, {"name": "now", "arguments": {}}]'
    assert text.endswith(f"Time?<assistant>{calls}<user>Result of now:\nnoon call_1\n\nResult of now:\nnoon call_2")


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages"])
async def test_foreign_ids_of_calls_are_mapped_in_the_conversation(
    model_of: EngineOf, http_of: HttpOf, path: str
) -> None:
    body: dict[str, Any] = {"messages": loop("toolu_01A"), "tools": [TOOL]}
    if path == "/v1/messages":
        use = {"type": "tool_use", "id": "toolu_01A", "name": "now", "input": {}}
        result = {"type": "tool_result", "tool_use_id": "toolu_01A", "content": "noon"}
        turns = [said("user", "Time?"), {"role": "assistant", "content": [use]}, {"role": "user", "content": [result]}]
        body = {"messages": turns, "tools": [{"name": "now", "input_schema": {"type": "object"}}], "max_tokens": 9}
    text = await prompt(model_of(template=MISTRAL), http_of, path, body)
    assert text.count(short_id("toolu_01A")) == 2
    assert "toolu_01A" not in text.replace("noon toolu_01A", "")


async def test_calls_at_once_are_written_one_by_one(model_of: EngineOf, http_of: HttpOf) -> None:
    body = {"messages": loop("a", "b"), "tools": [TOOL]}
    text = await prompt(model_of(template=ONE_CALL), http_of, "/v1/chat/completions", body)
    assert text.endswith("<user>Time?<call>{}<tool>noon a<call>{}<tool>noon b")


LONG = '{"a": 123456789012345678901234567890, "b": [0.12345678901234567890123, 1e400, -1E-500], "c": 1.5}'
NUMBERS = (
    "{{ tools | tojson }}|{{ wanted | tojson }}|{{ wanted.a }}|{% for m in messages %}{% for c in m.tool_calls or [] %}"
    "{{ c.function.arguments | tojson }}{% endfor %}{{ m.content }}{% endfor %}"
)


@pytest.mark.parametrize("template", [NUMBERS, NO_SYSTEM])
async def test_numbers_of_a_client_keep_their_digits(model_of: EngineOf, http_of: HttpOf, template: str) -> None:
    function = {"name": "now", "arguments": LONG}
    call = {"role": "assistant", "tool_calls": [{"id": "a", "type": "function", "function": function}]}
    result = {"role": "tool", "tool_call_id": "a", "content": "noon"}
    tool = '{"type": "function", "function": {"name": "now", "parameters": {"type": "object", "default": LONG}}}'
    body = json.dumps({"model": "tiny", "messages": [said("user", "Time?"), call, result]})[:-1]
    body += f', "tools": [{tool.replace("LONG", LONG)}]'
    body += f', "chat_template_kwargs": {{"wanted": {LONG}}}}}' if template == NUMBERS else "}"
    async with serving(model_of(template=template)) as served:
        headers = {"content-type": "application/json"}
        answer = await http_of(served).post("/v1/chat/completions", content=body, headers=headers)
        assert answer.status_code == 200, answer.text
        [request] = served.engine.requests()
        text = prompt_of(served, request)
    assert text.count(LONG) == (3 if template == NUMBERS else 2)
    if template == NUMBERS:
        assert "|123456789012345678901234567890|" in text


async def test_the_reason_of_a_template_is_in_the_error(model_of: EngineOf, http_of: HttpOf) -> None:
    template = "{% if messages[-1].content == 'b' %}{{ raise_exception('No b here!') }}{% endif %}" + SYSTEM_FIRST
    async with serving(model_of(template=template)) as served:
        messages = [said("user", "b")]
        answer = await http_of(served).post("/v1/chat/completions", json={"model": "tiny", "messages": messages})
    assert answer.status_code == 400
    assert "No b here!" in answer.json()["error"]["message"]
