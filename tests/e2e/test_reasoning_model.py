"""A random model that reasons and calls tools, from a directory: three clients get valid calls."""

import json
from collections.abc import Callable, Iterator
from typing import Any

import anthropic
import pytest
from langchain_openai import ChatOpenAI
from openai import OpenAI
from pydantic import SecretStr

from tests.e2e.clients.test_tools import NAMED, QUESTION, TOOLS, check
from tests.e2e.random_checkpoint import REASONING, write
from tests.server_process import Server

BUDGET = 12
MARKS = 4
"""Tokens around the reasoning, which are counted with it."""
NOTHING = {"type": "object", "properties": {}, "additionalProperties": False}
LEAST_BUDGET = 1024
"""Least budget of reasoning tokens in Anthropic's API."""


@pytest.fixture(scope="module")
def reasoner(start: Callable[..., Server], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    directory = write(tmp_path_factory.mktemp("reasoner") / "tiny-reasoner", REASONING)
    server = start(str(directory), "--kv-cache-bytes", "64MiB").wait()
    yield server
    assert server.stop() == 0, "\n".join(server.lines)


@pytest.fixture
def name(reasoner: Server) -> str:
    return reasoner.model()


@pytest.fixture
def openai_client(reasoner: Server) -> OpenAI:
    return reasoner.client()


def asked(model: str, choice: Any, **more: Any) -> dict[str, Any]:
    return {
        "model": model,
        "messages": [QUESTION],
        "tools": TOOLS,
        "tool_choice": choice,
        "parallel_tool_calls": False,
        "max_tokens": 400,
        "temperature": 1.0,
        "seed": 3,
        "extra_body": {"thinking_token_budget": BUDGET},
        **more,
    }


@pytest.mark.parametrize(("choice", "finish"), [("required", "tool_calls"), (NAMED, "stop")], ids=["required", "named"])
def test_it_reasons_within_its_budget_and_calls(openai_client: OpenAI, name: str, choice: Any, finish: str) -> None:
    answer = openai_client.chat.completions.create(**asked(name, choice, n=2))
    for each in answer.choices:
        assert (each.finish_reason, each.message.content) == (finish, None)
        assert each.message.model_extra
        assert each.message.model_extra["reasoning_content"]
        [call] = each.message.tool_calls or []
        assert call.type == "function"
        check(call.function.name, call.function.arguments)
    assert answer.usage is not None
    assert answer.usage.completion_tokens_details is not None
    assert 2 <= (answer.usage.completion_tokens_details.reasoning_tokens or 0) <= 2 * (BUDGET + MARKS)


def test_a_stream_tells_the_same_in_order(openai_client: OpenAI, name: str) -> None:
    [whole] = openai_client.chat.completions.create(**asked(name, "required")).choices
    reasoning, arguments, order = "", "", []
    for chunk in openai_client.chat.completions.create(**asked(name, "required"), stream=True):
        for choice in chunk.choices:
            if thought := (choice.delta.model_extra or {}).get("reasoning_content"):
                reasoning += thought
                order.append("reasoning")
            for delta in choice.delta.tool_calls or []:
                assert delta.function is not None
                arguments += delta.function.arguments or ""
                order.append("call")
    assert whole.message.model_extra
    assert reasoning == whole.message.model_extra["reasoning_content"]
    [call] = whole.message.tool_calls or []
    assert call.type == "function"
    assert arguments == call.function.arguments
    assert order == sorted(order, reverse=True), "the call began before the reasoning had ended"


def test_a_result_is_read_in_the_next_turn(openai_client: OpenAI, name: str) -> None:
    first = openai_client.chat.completions.create(**asked(name, "required")).choices[0].message
    [call] = first.tool_calls or []
    result = {"role": "tool", "tool_call_id": call.id, "content": "Booked."}
    told = asked(name, "none", messages=[QUESTION, first.model_dump(exclude_none=True), result], max_tokens=60)
    answer = openai_client.chat.completions.create(**told).choices[0]
    assert answer.message.content
    assert not answer.message.tool_calls


def test_langchain_gets_a_valid_call(reasoner: Server, name: str) -> None:
    chat = ChatOpenAI(
        model=name,
        base_url=f"{reasoner.url}/v1",
        api_key=SecretStr("any"),
        max_retries=0,
        timeout=60,
        extra_body={"thinking_token_budget": BUDGET},
    )
    answer = chat.bind_tools(TOOLS, tool_choice="book_table", parallel_tool_calls=False).invoke("A table, please.")
    [call] = answer.tool_calls
    check(call["name"], json.dumps(call["args"]))
    assert answer.usage_metadata is not None
    assert answer.usage_metadata["output_token_details"]["reasoning"] > 0


@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
def test_anthropics_client_gets_thoughts_and_a_valid_call(reasoner: Server, name: str, streamed: bool) -> None:
    functions = [each["function"] for each in TOOLS]
    tools: Any = [{"name": each["name"], "input_schema": each.get("parameters", NOTHING)} for each in functions]
    told: dict[str, Any] = {
        "model": name,
        "max_tokens": LEAST_BUDGET + 400,
        "messages": [QUESTION],
        "tools": tools,
        "tool_choice": {"type": "any", "disable_parallel_tool_use": True},
        "thinking": {"type": "enabled", "budget_tokens": LEAST_BUDGET},
    }
    with anthropic.Anthropic(
        base_url=reasoner.url, api_key="any", max_retries=0, timeout=60, _strict_response_validation=True
    ) as client:
        if streamed:
            with client.messages.stream(**told) as stream:
                answer: Any = stream.get_final_message()
        else:
            answer = client.messages.create(**told)
    thoughts, call = answer.content
    assert (thoughts.type, call.type) == ("thinking", "tool_use")
    assert thoughts.thinking
    assert answer.stop_reason == "tool_use"
    check(call.name, json.dumps(call.input))
