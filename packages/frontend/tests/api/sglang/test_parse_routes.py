"""SGLang's /parse_function_call and /separate_reasoning."""

from collections.abc import Callable
from typing import Any

import httpx2
import pytest

from tercet.frontend.api.sglang.parse_routes import _function_calls
from tercet.frontend.parsers.registry import ParserNames, make_parser
from tercet.frontend.testing import FakeEngine, Served, serving

EngineOf = Callable[..., FakeEngine]
HttpOf = Callable[[Served], httpx2.AsyncClient]
CALL = 'Wait. <tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}


@pytest.mark.parametrize("name", ["qwen25", "hermes"])
async def test_calls_are_parsed(engine_of: EngineOf, http_of: HttpOf, name: str) -> None:
    async with serving(engine_of()) as served:
        answer = await http_of(served).post(
            "/parse_function_call", json={"text": CALL, "tools": [WEATHER], "tool_call_parser": name}
        )
    assert answer.json() == {
        "normal_text": "Wait. ",
        "calls": [{"tool_index": 0, "name": "weather", "parameters": '{"city": "Rome"}'}],
    }


async def test_calls_are_parsed_in_the_notation_of_the_model(engine_of: EngineOf, http_of: HttpOf) -> None:
    body = {"text": '{"name": "weather", "arguments": {"city": "Rome"}}', "tools": [WEATHER]}
    async with serving(engine_of()) as served:
        answer = await http_of(served).post("/parse_function_call", json=body)
    assert answer.json()["calls"] == [{"tool_index": 0, "name": "weather", "parameters": '{"city": "Rome"}'}]


def test_many_calls_are_parsed_merged_and_written_in_steps() -> None:
    """The event loop has other work between steps: none of them has more than a few calls."""
    parser, calls = make_parser(ParserNames(tools="hermes")), 1000
    assert parser is not None
    steps = sum(1 for _ in _function_calls(parser, CALL * calls))
    assert steps > calls + len(CALL) * calls // 512


@pytest.mark.parametrize(
    ("name", "text", "reasoning", "rest"),
    [
        ("qwen3", "<think>a</think>b", "a", "b"),
        ("deepseek-r1", "a</think>b", "a", "b"),
        ("qwen3-thinking", "a</think>b", "a", "b"),
        ("qwen3", "plain", "", "plain"),
        ("gpt-oss", "<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>final<|message|>b", "a", "b"),
    ],
)
async def test_reasoning_is_separated(
    engine_of: EngineOf, http_of: HttpOf, name: str, text: str, reasoning: str, rest: str
) -> None:
    body = {"text": text, "reasoning_parser": name}
    async with serving(engine_of()) as served:
        answer = await http_of(served).post("/separate_reasoning", json=body)
    assert answer.json() == {"reasoning_text": reasoning, "text": rest}


async def test_blocks_keep_their_order(engine_of: EngineOf, http_of: HttpOf) -> None:
    body = {"text": "<think>a</think>b", "reasoning_parser": "qwen3", "return_blocks": True}
    async with serving(engine_of()) as served:
        answer = (await http_of(served).post("/separate_reasoning", json=body)).json()
    assert answer["blocks"] == [{"type": "reasoning", "text": "a"}, {"type": "text", "text": "b"}]
    assert (answer["reasoning_blocks"], answer["text_blocks"]) == (["a"], ["b"])


@pytest.mark.parametrize(
    ("path", "param", "more"),
    [
        ("/parse_function_call", "tool_call_parser", {}),
        ("/separate_reasoning", "reasoning_parser", {}),
        ("/parse_function_call", "tools", {"tool_call_parser": "hermes", "tools": 3}),
        ("/parse_function_call", "tool_call_parser", {"tool_call_parser": ""}),
        ("/separate_reasoning", "reasoning_parser", {"reasoning_parser": ""}),
    ],
)
async def test_refusals_name_the_parameter(
    engine_of: EngineOf, http_of: HttpOf, path: str, param: str, more: dict[str, Any]
) -> None:
    async with serving(engine_of()) as served:
        answer = await http_of(served).post(path, json={"text": "a", param: "unheard-of", **more})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
