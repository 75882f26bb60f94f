"""/v1/responses as Codex uses it: functions in namespaces, an offline search, and its extra fields."""

import json
from collections.abc import Callable
from typing import Any

import httpx2
import msgspec
import openai
import pytest
from openai.types.responses import Response

from packages.frontend.tests.api.openai.tool_chat import prompt_of
from tercet.frontend.api.responses.items import messages_of
from tercet.frontend.testing import FakeEngine, Script, Served, Token, serving
from tercet.protocol.messages.values import ModelLimits

EngineOf = Callable[..., FakeEngine]
OpenAIOf = Callable[..., openai.AsyncOpenAI]
HttpOf = Callable[[Served], httpx2.AsyncClient]

PLAN: dict[str, Any] = {
    "type": "function",
    "name": "update_plan",
    "description": "Updates the plan.",
    "strict": False,
    "parameters": {"type": "object", "properties": {"plan": {"type": "string"}}, "required": ["plan"]},
}
CLOSE: dict[str, Any] = {
    "type": "function",
    "name": "close_agent",
    "description": "Close an agent.",
    "strict": False,
    "parameters": {
        "type": "object",
        "properties": {"target": {"type": "string"}},
        "required": ["target"],
        "additionalProperties": False,
    },
}
AGENTS: dict[str, Any] = {
    "type": "namespace",
    "name": "multi_agent_v1",
    "description": "Tools for sub-agents.",
    "tools": [CLOSE, {**CLOSE, "name": "resume_agent", "description": "Resume an agent."}],
}
SEARCH: dict[str, Any] = {"type": "web_search", "external_web_access": False, "search_context_size": "low"}
ASKED: list[dict[str, Any]] = [
    {"type": "message", "id": "msg_1", "role": "developer", "content": [{"type": "input_text", "text": "You code."}]},
    {"type": "message", "id": "msg_2", "role": "user", "content": [{"type": "input_text", "text": "say hello"}]},
]
BODY: dict[str, Any] = {
    "model": "tiny",
    "stream": True,
    "input": ASKED,
    "tools": [PLAN, AGENTS, SEARCH],
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "reasoning": {"summary": "auto"},
    "store": False,
    "include": ["reasoning.encrypted_content"],
    "prompt_cache_key": "01a212f9-2716-7073-9651-d89a15582c48",
    "client_metadata": {"x-codex-window-id": "01a212f9:0", "x-codex-turn-metadata": '{"session_id": "01a212f9"}'},
}
CALLED = "multi_agent_v1__close_agent"


@pytest.fixture
def roomy(limits: ModelLimits) -> ModelLimits:
    return msgspec.structs.replace(limits, context_length=4096)


def calling(name: str) -> Script:
    call = json.dumps([{"name": name, "arguments": {"target": "a7"}}])
    return lambda _request, _index: [Token(10, call)]


async def test_a_call_of_a_function_in_a_namespace_has_both_names(
    engine_of: EngineOf, openai_of: OpenAIOf, roomy: ModelLimits
) -> None:
    async with serving(engine_of(calling(CALLED), limits=roomy)) as served:
        more: Any = {"extra_body": {"client_metadata": BODY["client_metadata"]}}
        asked: Any = {name: value for name, value in BODY.items() if name != "client_metadata"}
        events = [event async for event in await openai_of(served).responses.create(**asked, **more)]
        told = prompt_of(served)
    answer = events[-1].response
    assert isinstance(answer, Response)
    [call] = answer.output
    assert call.type == "function_call"
    assert (call.namespace, call.name, json.loads(call.arguments)) == (
        "multi_agent_v1",
        "close_agent",
        {"target": "a7"},
    )
    [done] = [event for event in events if event.type == "response.function_call_arguments.done"]
    assert done.name == "close_agent"
    assert [tool.to_dict() for tool in answer.tools] == [PLAN, AGENTS]
    assert CALLED in told
    assert "multi_agent_v1__resume_agent" in told
    assert told.count("Tools for sub-agents.") == 1


async def test_a_function_outside_has_no_namespace(engine_of: EngineOf, http_of: HttpOf, roomy: ModelLimits) -> None:
    async with serving(engine_of(calling("update_plan"), limits=roomy)) as served:
        answer = await http_of(served).post("/v1/responses", json={**BODY, "stream": False})
    [call] = answer.json()["output"]
    assert call["name"] == "update_plan"
    assert "namespace" not in call


def test_the_model_reads_its_call_as_it_made_it() -> None:
    call = {"type": "function_call", "call_id": "c1", "name": "close_agent", "arguments": '{"target": "a7"}'}
    [message] = messages_of([], [{**call, "namespace": "multi_agent_v1"}], None)
    [made] = message["tool_calls"]
    assert made["function"] == {"name": CALLED, "arguments": '{"target": "a7"}'}


async def test_a_call_in_a_namespace_may_come_back(engine_of: EngineOf, http_of: HttpOf, roomy: ModelLimits) -> None:
    call = {"type": "function_call", "call_id": "c1", "name": "close_agent", "arguments": '{"target": "a7"}'}
    result = {"type": "function_call_output", "call_id": "c1", "output": "closed"}
    given = [*ASKED, {**call, "namespace": "multi_agent_v1"}, {**result, "namespace": "multi_agent_v1"}]
    async with serving(engine_of(limits=roomy)) as served:
        answer = await http_of(served).post("/v1/responses", json={**BODY, "input": given})
    assert answer.status_code == 200, answer.text


async def test_a_function_in_a_namespace_can_be_chosen(
    engine_of: EngineOf, http_of: HttpOf, roomy: ModelLimits
) -> None:
    chosen = {"type": "function", "name": CALLED}
    async with serving(engine_of(calling(CALLED), limits=roomy)) as served:
        fine = await http_of(served).post("/v1/responses", json={**BODY, "stream": False, "tool_choice": chosen})
        other = await http_of(served).post(
            "/v1/responses", json={**BODY, "tool_choice": {**chosen, "name": "close_agent"}}
        )
    assert fine.status_code == 200, fine.text
    assert (other.status_code, other.json()["error"]["param"]) == (400, "tool_choice")


@pytest.mark.parametrize(
    ("tools", "param"),
    [
        ([{**SEARCH, "external_web_access": True}], "tools[0]"),
        ([{"type": "web_search"}], "tools[0]"),
        ([PLAN, {**AGENTS, "tools": [CLOSE, {"type": "mcp", "name": "x"}]}], "tools[1].tools[1]"),
        ([{**AGENTS, "tools": []}], "tools[0].tools"),
        ([SEARCH, {**PLAN, "name": "a b"}], "tools[1].name"),
        ([AGENTS, AGENTS], "tools"),
        ([AGENTS, {**PLAN, "name": CALLED}], "tools"),
        ([{**AGENTS, "tools": [{**CLOSE, "defer_loading": True}]}], "tools[0].tools[0].defer_loading"),
    ],
)
async def test_what_cannot_be_called_is_refused_by_its_place(
    tools: list[dict[str, Any]], param: str, engine_of: EngineOf, http_of: HttpOf, roomy: ModelLimits
) -> None:
    async with serving(engine_of(limits=roomy)) as served:
        answer = await http_of(served).post("/v1/responses", json={**BODY, "tools": tools})
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param
