"""/v1/responses on a whole server, through OpenAI's client in strict validation."""

import itertools
import json
import re
import time
from typing import Any

import pytest
from openai import BadRequestError, OpenAI
from openai.types.responses import FunctionToolParam, Response

from tests.server_process import Server

LONG: dict[str, Any] = {"temperature": 0, "max_output_tokens": 100, "extra_body": {"ignore_eos": True, "seed": 1}}
WEATHER: FunctionToolParam = {
    "type": "function",
    "name": "weather",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 12}},
        "required": ["city"],
        "additionalProperties": False,
    },
    "strict": True,
}


def until_ended(client: OpenAI, response: str, limit: float = 150.0) -> Response:
    end = time.monotonic() + limit
    while (answer := client.responses.retrieve(response)).status in {"queued", "in_progress"}:
        assert time.monotonic() < end, answer.status
        time.sleep(0.05)
    return answer


def test_plain_and_streamed_say_the_same(client: OpenAI, model: str) -> None:
    asked: dict[str, Any] = {"model": model, "input": "What is a scheduler?", "max_output_tokens": 40, "temperature": 0}
    whole = client.responses.create(**asked)
    with client.responses.stream(**asked) as stream:
        numbers = [(event.sequence_number, event.type) for event in stream]
        streamed = stream.get_final_response()
    assert whole.output_text
    assert streamed.output_text == whole.output_text
    assert streamed.usage == whole.usage or streamed.usage is not None
    assert [number for number, _ in numbers] == list(range(len(numbers)))
    assert client.responses.retrieve(whole.id) == whole


def test_a_conversation_goes_on_and_is_kept(client: OpenAI, model: str) -> None:
    first = client.responses.create(model=model, input="Hello", max_output_tokens=16)
    second = client.responses.create(model=model, input="Go on", previous_response_id=first.id, max_output_tokens=16)
    assert second.usage is not None
    assert first.usage is not None
    assert second.usage.input_tokens > first.usage.input_tokens + first.usage.output_tokens
    items = list(client.responses.input_items.list(second.id, order="asc"))
    assert [item.type for item in items][:2] == ["message", "message"]
    client.responses.delete(first.id)
    with pytest.raises(BadRequestError, match="not found"):
        client.responses.create(model=model, input="Again", previous_response_id=first.id)


def test_a_required_call_is_valid_and_its_result_is_read(client: OpenAI, model: str) -> None:
    answer = client.responses.create(
        model=model, input="How is the weather?", tools=[WEATHER], tool_choice="required", parallel_tool_calls=False
    )
    [call] = [item for item in answer.output if item.type == "function_call"]
    assert call.name == "weather"
    assert set(json.loads(call.arguments)) == {"city"}
    told = client.responses.create(
        model=model,
        previous_response_id=answer.id,
        input=[{"type": "function_call_output", "call_id": call.call_id, "output": "It rains."}],
        max_output_tokens=16,
    )
    assert told.status in {"completed", "incomplete"}


def test_an_answer_keeps_to_its_schema(client: OpenAI, model: str) -> None:
    schema = {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 8},
            "age": {"type": "integer", "minimum": 0, "maximum": 99},
        },
        "required": ["name", "age"],
        "additionalProperties": False,
    }
    answer = client.responses.create(
        model=model,
        input="Who?",
        text={"format": {"type": "json_schema", "name": "person", "schema": schema, "strict": True}},
    )
    person = json.loads(answer.output_text)
    assert set(person) == {"name", "age"}
    assert 0 <= person["age"] <= 99


def test_a_background_response_is_cancelled(client: OpenAI, model: str, server: Server) -> None:
    queued = client.responses.create(model=model, input="Count", background=True, **LONG)
    assert client.responses.cancel(queued.id).status == "cancelled"
    server.wait_for(lambda load: load["running"] == 0)
    assert client.responses.retrieve(queued.id).status == "cancelled"


def respond_despite_a_kill(server: Server) -> Response:
    """Return a background response whose frontend is killed, after it was compared with one of an unbroken frontend."""
    with server.client() as client:
        asked: dict[str, Any] = {"model": client.models.list().data[0].id, "input": "Tell me of the sea.", **LONG}
        whole = client.responses.create(**asked).output_text
        with client.responses.create(**asked, background=True, stream=True) as stream:
            first = next(stream)
            assert first.type == "response.created"
            queued = first.response.id
            seen = [first, *itertools.islice(stream, 15)]
            owner = re.match(r"resp_(.+)-.{24}$", queued)
            assert owner is not None
            kill_frontend(server, owner[1])

    with server.client() as client:
        made = until_ended(client, queued)
        assert (made.status, made.output_text) == ("incomplete", whole), "every token, whoever made it"
        after = seen[-1].sequence_number
        events = [*seen, *client.responses.retrieve(queued, stream=True, starting_after=after)]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == whole
    return made


def go_on_after_a_restart(client: OpenAI, made: Response) -> None:
    assert client.responses.retrieve(made.id) == made
    goes_on = client.responses.create(
        model=made.model, input="And then?", previous_response_id=made.id, max_output_tokens=8
    )
    assert goes_on.previous_response_id == made.id


def kill_frontend(server: Server, peer: str) -> None:
    process = server.part(peer)
    process.kill()
    process.wait(10)
