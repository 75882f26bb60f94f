"""Anthropic's /v1/messages on a whole server, through Anthropic's client in strict validation."""

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import pytest

from tests.server_process import Server

ASKED: dict[str, Any] = {"max_tokens": 40, "messages": [{"role": "user", "content": "What is a tercet?"}]}
GREEDY = {"temperature": 0}
WEATHER: Any = {
    "name": "weather",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 12}},
        "required": ["city"],
        "additionalProperties": False,
    },
}


@pytest.fixture
def messages(server: Server) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(
        base_url=server.url, api_key="any", max_retries=0, timeout=60, _strict_response_validation=True
    ) as client:
        yield client


def test_plain_and_streamed_say_the_same(messages: anthropic.Anthropic, model: str) -> None:
    whole = messages.messages.create(model=model, extra_body=GREEDY, **ASKED)
    with messages.messages.stream(model=model, extra_body=GREEDY, **ASKED) as stream:
        pieces = list(stream.text_stream)
        streamed = stream.get_final_message()
    [block] = whole.content
    assert block.type == "text"
    assert "".join(pieces) == block.text
    assert [part.to_dict()["text"] for part in streamed.content] == [block.text]
    assert streamed.stop_reason == whole.stop_reason
    assert streamed.usage.output_tokens == whole.usage.output_tokens
    count = messages.messages.count_tokens(model=model, messages=ASKED["messages"])
    assert count.input_tokens == whole.usage.input_tokens + (whole.usage.cache_read_input_tokens or 0)


def test_a_stop_sequence_ends_it_and_is_not_told(messages: anthropic.Anthropic, model: str) -> None:
    whole = messages.messages.create(model=model, extra_body=GREEDY, **ASKED)
    assert whole.content[0].type == "text"
    word = whole.content[0].text.split()[2]
    cut = messages.messages.create(model=model, extra_body=GREEDY, stop_sequences=[word], **ASKED)
    assert (cut.stop_reason, cut.stop_sequence) == ("stop_sequence", word)
    assert cut.content[0].type == "text"
    assert word not in cut.content[0].text
    assert whole.content[0].text.startswith(cut.content[0].text)


def test_a_tool_has_to_be_called_and_its_result_is_read(messages: anthropic.Anthropic, model: str) -> None:
    options: dict[str, Any] = {"model": model, "tools": [WEATHER], "tool_choice": {"type": "any"}}
    body = {**ASKED, "max_tokens": 300}
    answer = messages.messages.create(**options, **body)
    with messages.messages.stream(**options, **body) as stream:
        parts = [event.partial_json for event in stream if event.type == "input_json"]
        streamed = stream.get_final_message()
    for each in (answer, streamed):
        assert each.stop_reason == "tool_use"
        assert [(block.type, getattr(block, "name", "")) for block in each.content][-1] == ("tool_use", "weather")
    assert json.loads("".join(parts)).keys() == {"city"}
    call = answer.content[-1]
    assert call.type == "tool_use"
    assert set(call.input) == {"city"}
    result: Any = {"type": "tool_result", "tool_use_id": call.id, "content": "It rains."}
    said = [*ASKED["messages"], answer.to_param(), {"role": "user", "content": [result]}]
    told = messages.messages.create(model=model, max_tokens=8, messages=said, tools=[WEATHER])
    assert told.usage.output_tokens > 0


def test_a_wrong_request_is_told_in_anthropics_words(messages: anthropic.Anthropic, model: str) -> None:
    with pytest.raises(anthropic.BadRequestError) as error:
        messages.messages.create(model=model, max_tokens=8, messages=[])
    assert error.value.body["error"]["type"] == "invalid_request_error"  # type: ignore[index]
    with pytest.raises(anthropic.NotFoundError):
        messages.messages.create(model="none", **ASKED)
