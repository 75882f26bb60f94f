"""Custom tools of /v1/responses through OpenAI's client, which validates strictly."""

import json
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import httpx2
import msgspec
import openai
import pytest
from openai.types.responses import Response, ResponseCustomToolCall, ResponseStreamEvent

from packages.frontend.tests.api.openai.tool_chat import TEMPLATE, prompt_of
from packages.frontend.tests.api.responses.test_background import die, ended, numbered, until_running
from tercet.frontend.api.responses.items import messages_of
from tercet.frontend.chat.messages import history
from tercet.frontend.config.config import StoreConfig
from tercet.frontend.testing import FakeEngine, Script, Served, Token, serving
from tercet.protocol.messages.values import ModelLimits

EngineOf = Callable[..., FakeEngine]
OpenAIOf = Callable[..., openai.AsyncOpenAI]
HttpOf = Callable[[Served], httpx2.AsyncClient]

INPUT = '*** Begin Patch\n*** Add File: hé "😀".txt\n+\\d\n*** End Patch\n'
LARK = """start: begin_patch hunk+ end_patch
begin_patch: "*** Begin Patch" LF
end_patch: "*** End Patch" LF?

hunk: add_hunk | delete_hunk | update_hunk
add_hunk: "*** Add File: " filename LF add_line+
delete_hunk: "*** Delete File: " filename LF
update_hunk: "*** Update File: " filename LF change_move? change?

filename: /(.+)/
add_line: "+" /(.*)/ LF -> line

change_move: "*** Move to: " filename LF
change: (change_context | change_line)+ eof_line?
change_context: ("@@" | "@@ " /(.+)/) LF
change_line: ("+" | "-" | " ") /(.*)/ LF
eof_line: "*** End of File" LF

%import common.LF
"""
"""The grammar that Codex sends for its `apply_patch`."""
PATCH: dict[str, Any] = {
    "type": "custom",
    "name": "apply_patch",
    "description": "Edits files.",
    "format": {"type": "grammar", "syntax": "lark", "definition": LARK},
}
DIGITS: dict[str, Any] = {**PATCH, "format": {"type": "grammar", "syntax": "regex", "definition": "[0-9]+"}}
WEATHER: dict[str, Any] = {
    "type": "function",
    "name": "weather",
    "description": "The weather.",
    "parameters": {"type": "object"},
    "strict": False,
}
FILES: dict[str, Any] = {
    "type": "namespace",
    "name": "files",
    "description": "Tools for files.",
    "tools": [{**WEATHER, "name": "read"}, PATCH],
}
NAMED: dict[str, Any] = {"type": "custom", "name": "apply_patch"}
BODY: dict[str, Any] = {"model": "tiny", "input": "Edit it.", "tools": [WEATHER, PATCH]}


@pytest.fixture
def model_saying(engine_of: EngineOf, files: dict[str, bytes], limits: ModelLimits) -> EngineOf:
    """Return an engine whose model has a Hermes template and accepts grammars."""
    roomy = msgspec.structs.replace(limits, context_length=4096)
    return partial(engine_of, files={**files, "chat_template.jinja": TEMPLATE.encode()}, limits=roomy)


@pytest.fixture
def store(tmp_path: Path) -> StoreConfig:
    return StoreConfig(response_store=str(tmp_path / "responses.sqlite"))


def calling(name: str = "apply_patch", arguments: Any = None) -> Script:
    call = json.dumps({"name": name, "arguments": {"input": INPUT} if arguments is None else arguments})
    text = f"<tool_call>\n{call}\n</tool_call>"
    tokens = [Token(10 + place % 200, char) for place, char in enumerate(text)]
    return lambda _request, _index: tokens


def read_again(served: Served) -> list[Any]:
    """Return the earlier calls in the prompt of the model."""
    written = re.findall("<tool_call>(.+?)</tool_call>", prompt_of(served))
    return [json.loads(each) for each in written]


def call_of(answer: Response) -> ResponseCustomToolCall:
    [call] = answer.output
    assert isinstance(call, ResponseCustomToolCall)
    return call


async def stream_of(client: openai.AsyncOpenAI, **options: Any) -> list[ResponseStreamEvent]:
    return await numbered(await client.responses.create(**{**BODY, "stream": True, **options}))


async def test_a_call_is_an_item_with_its_input(model_saying: EngineOf, openai_of: OpenAIOf) -> None:
    async with serving(model_saying(calling())) as served:
        answer = await openai_of(served).responses.create(**BODY)
        events = await stream_of(openai_of(served))
        told = prompt_of(served)
    call = call_of(answer)
    assert call.id is not None
    assert (call.id[:4], call.call_id[:5], call.name, call.input) == ("ctc_", "call_", "apply_patch", INPUT)
    assert call.to_dict()["status"] == "completed"
    assert [tool.to_dict() for tool in answer.tools] == [WEATHER, PATCH]
    kinds = [event.type.removeprefix("response.") for event in events]
    deltas = [event.delta for event in events if event.type == "response.custom_tool_call_input.delta"]
    [done] = [event for event in events if event.type == "response.custom_tool_call_input.done"]
    assert "".join(deltas) == done.input == INPUT
    assert len(deltas) > len(INPUT) - 5, "they come as the model writes them"
    assert kinds[2:4] == ["output_item.added", "custom_tool_call_input.delta"]
    assert kinds[-3:] == ["custom_tool_call_input.done", "output_item.done", "completed"]
    assert call_of(events[-1].response).input == INPUT  # type: ignore[union-attr]
    assert json.dumps(LARK)[1:-1] in told


async def test_what_clients_put_together_comes_back(model_saying: EngineOf, openai_of: OpenAIOf) -> None:
    async with serving(model_saying(calling())) as served:
        client: Any = openai_of(served)
        async with client.responses.stream(**BODY) as stream:
            streamed = await stream.get_final_response()
        for answer in (streamed, await client.responses.parse(**BODY)):
            call = call_of(answer)
            output = {"type": "custom_tool_call_output", "call_id": call.call_id, "output": "Done."}
            await client.responses.create(**{**BODY, "input": [call.model_dump(), output]})
            assert read_again(served) == [{"name": "apply_patch", "arguments": {"input": INPUT}}]


async def test_what_is_no_input_is_told_as_it_is(model_saying: EngineOf, openai_of: OpenAIOf) -> None:
    for arguments, expected in (({"patch": "x"}, '{"patch": "x"}'), ("raw\n", "raw\n"), ({}, "")):
        async with serving(model_saying(calling(arguments=arguments))) as served:
            assert call_of(await openai_of(served).responses.create(**BODY)).input == expected
            [*_, last] = await stream_of(openai_of(served))
            assert call_of(last.response).input == expected  # type: ignore[union-attr]


async def test_a_custom_tool_may_stand_in_a_namespace(model_saying: EngineOf, openai_of: OpenAIOf) -> None:
    chosen = {"type": "custom", "name": "files__apply_patch"}
    async with serving(model_saying(calling("files__apply_patch"))) as served:
        answer = await openai_of(served).responses.create(**{**BODY, "tools": [FILES], "tool_choice": chosen})
        told = prompt_of(served)
    call = call_of(answer)
    assert (call.namespace, call.name, call.input) == ("files", "apply_patch", INPUT)
    assert [tool.to_dict() for tool in answer.tools] == [FILES]
    assert "Tools for files." in told
    assert "files__apply_patch" in told


async def test_an_answered_call_is_read_again_as_it_was_made(
    model_saying: EngineOf, openai_of: OpenAIOf, store: StoreConfig
) -> None:
    output: dict[str, Any] = {"type": "custom_tool_call_output", "output": [{"type": "input_text", "text": "Done."}]}
    async with serving(model_saying(calling("files__apply_patch")), store=store) as served:
        client: Any = openai_of(served)
        asked = {**BODY, "tools": [FILES]}
        first = await client.responses.create(**asked)
        call = call_of(first)
        answered = {**output, "call_id": call.call_id}
        await client.responses.create(**{**asked, "input": [answered], "previous_response_id": first.id})
        chained = prompt_of(served)
        assert read_again(served) == [{"name": "files__apply_patch", "arguments": {"input": INPUT}}]
        for item in (call, call.to_dict(), {"type": "item_reference", "id": call.id}):
            given = [{"role": "user", "content": BODY["input"]}, item, answered]
            counted = await client.responses.input_tokens.count(**{**asked, "input": given})
            again = await client.responses.create(**{**asked, "input": given})
            assert prompt_of(served) == chained
            assert counted.input_tokens == again.usage.input_tokens
        items = await client.responses.input_items.list(again.id)
        kept = await client.responses.retrieve(first.id)
    assert [item.type for item in items.data] == ["custom_tool_call_output", "custom_tool_call", "message"]
    assert [item.id[: item.id.index("_")] for item in items.data] == ["ctco", "ctc", "msg"]
    assert kept == first


def test_the_model_reads_its_call_as_it_made_it() -> None:
    call = {"type": "custom_tool_call", "call_id": "c1", "name": "apply_patch", "input": INPUT, "namespace": "files"}
    output = {"type": "custom_tool_call_output", "call_id": "c1", "output": "Done."}
    assistant, result = history(messages_of([], [call, output], None))
    [made] = assistant["tool_calls"]
    assert made["function"] == {"name": "files__apply_patch", "arguments": {"input": INPUT}}
    assert (result["name"], result["content"]) == ("files__apply_patch", "Done.")


async def test_what_another_frontend_goes_on_with_is_the_same_call(
    model_saying: EngineOf, openai_of: OpenAIOf, store: StoreConfig
) -> None:
    async with serving(model_saying(calling()), connect=False, store=store, peer="frontend-1") as heir:
        async with serving(model_saying(calling(), auto=False), store=store) as dying:
            stream = await openai_of(dying).responses.create(**BODY, stream=True, background=True)
            await until_running(dying)
            for _ in range(90):
                dying.engine.step()
            seen: list[Any] = []
            async for event in stream:
                seen.append(event)
                if "".join(each.delta for each in seen if each.type.endswith("delta")).startswith("*** Begin"):
                    break
            await stream.close()
            await die(dying)
            await heir.connect()
            client = openai_of(heir)
            response = seen[0].response.id
            rest = await client.responses.retrieve(response, stream=True, starting_after=seen[-1].sequence_number)
            whole = [*seen, *await numbered(rest)]
        made = await ended(client, response)
    assert [event.sequence_number for event in whole] == list(range(len(whole)))
    deltas = [event.delta for event in whole if event.type == "response.custom_tool_call_input.delta"]
    assert "".join(deltas) == INPUT
    [added] = [event.item for event in whole if event.type == "response.output_item.added"]
    assert (call_of(made).input, call_of(made).call_id) == (INPUT, added.call_id)


async def test_a_regular_expression_is_enforced_and_lark_is_told(model_saying: EngineOf, openai_of: OpenAIOf) -> None:
    allowed = {"type": "allowed_tools", "mode": "required", "tools": [NAMED]}
    async with serving(model_saying(calling())) as served:
        client: Any = openai_of(served)
        for options in ({}, {"tools": [DIGITS]}, {"tool_choice": NAMED}, {"tool_choice": allowed}):
            answer = await client.responses.create(**{**BODY, **options})
            assert answer.to_dict()["tool_choice"] == options.get("tool_choice", "auto")
        lark, regex, named, some = [request.sampling.grammar for request in served.engine.requests()]
    assert lark is None
    assert regex is not None
    assert "^(?:[0-9]+)$" in regex.text
    for grammar in (named, some):
        assert grammar is not None
        assert "apply_patch" in grammar.text
        assert "weather" not in grammar.text


def grammar(syntax: str, definition: str) -> dict[str, Any]:
    return {"type": "grammar", "syntax": syntax, "definition": definition}


CALL: dict[str, Any] = {"type": "custom_tool_call", "call_id": "c1", "name": "apply_patch", "input": "x"}
OUTPUT: dict[str, Any] = {"type": "custom_tool_call_output", "call_id": "c1", "output": "y"}


@pytest.mark.parametrize(
    ("asked", "param"),
    [
        ({"tools": [{**PATCH, "format": grammar("lark", "start: x")}]}, "tools[0].format.definition"),
        ({"tools": [{**PATCH, "format": grammar("regex", "(")}]}, "tools[0].format.definition"),
        (
            {
                "tools": [
                    {"type": "web_search", "external_web_access": False},
                    {**FILES, "tools": [WEATHER, {**PATCH, "format": grammar("lark", "start: x")}]},
                ]
            },
            "tools[1].tools[1].format.definition",
        ),
        ({"tools": [{**PATCH, "format": grammar("ebnf", "x")}]}, "tools[0].format.syntax"),
        ({"tools": [{**PATCH, "format": {"type": "json"}}]}, "tools[0].format.type"),
        ({"tools": [{**PATCH, "defer_loading": True}]}, "tools[0].defer_loading"),
        ({"tools": [{**PATCH, "strict": True}]}, "tools[0].strict"),
        ({"tools": [PATCH, {**WEATHER, "name": "apply_patch"}]}, "tools"),
        ({"tools": [PATCH] * 1025}, "tools"),
        ({"tool_choice": {"type": "custom", "name": "other"}}, "tool_choice"),
        ({"tool_choice": {"type": "custom", "name": "weather"}}, "tool_choice"),
        ({"tool_choice": {"type": "function", "name": "apply_patch"}}, "tool_choice"),
        ({"input": [{**CALL, "arguments": "{}"}]}, "input[0].arguments"),
        ({"input": [{"type": "custom_tool_call", "call_id": "c1", "name": "apply_patch"}]}, "input[0].input"),
        ({"input": [OUTPUT]}, "input[0].call_id"),
        ({"input": [CALL, {**OUTPUT, "type": "function_call_output"}]}, "input[1].call_id"),
        ({"input": [CALL, {**OUTPUT, "output": [{"type": "input_image"}]}]}, "input[1].output[0]"),
    ],
)
async def test_what_cannot_be_meant_is_refused_by_its_place(
    asked: dict[str, Any], param: str, model_saying: EngineOf, http_of: HttpOf
) -> None:
    async with serving(model_saying(calling())) as served:
        answer = await http_of(served).post("/v1/responses", json={**BODY, **asked})
        assert served.engine.requests() == []
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param
