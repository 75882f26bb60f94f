"""LangChain's ChatOpenAI works with the server with only another `base_url`."""

from typing import Any

import pytest
from langchain_core.messages import AIMessageChunk, HumanMessage, SystemMessage
from langchain_openai import ChatOpenAI
from pydantic import BaseModel, Field, SecretStr

from tests.server_process import Server

TALK = [SystemMessage("You are helpful."), HumanMessage("What is a tercet?")]


class Answer(BaseModel):
    """Structured answer."""

    name: str = Field(max_length=8)
    wanted: bool


@pytest.fixture
def chat(server: Server, model: str) -> ChatOpenAI:
    return ChatOpenAI(
        model=model,
        base_url=f"{server.url}/v1",
        api_key=SecretStr("any"),
        temperature=0,
        max_completion_tokens=120,
        stream_usage=True,
        max_retries=0,
        timeout=60,
    )


def test_an_answer_has_text_and_usage(chat: ChatOpenAI) -> None:
    answer = chat.invoke(TALK)
    assert "three" in str(answer.content)
    assert answer.usage_metadata is not None
    assert answer.usage_metadata["total_tokens"] > answer.usage_metadata["input_tokens"] > 0
    assert answer.response_metadata["finish_reason"] in {"stop", "length"}


def test_a_stream_adds_up_to_the_answer(chat: ChatOpenAI) -> None:
    whole: Any = None
    for chunk in chat.stream(TALK):
        assert isinstance(chunk, AIMessageChunk)
        whole = chunk if whole is None else whole + chunk
    assert whole.content == chat.invoke(TALK).content
    assert whole.usage_metadata["output_tokens"] > 0


async def test_many_at_a_time(chat: ChatOpenAI) -> None:
    answers = await chat.abatch([TALK] * 4)
    assert len({str(answer.content) for answer in answers}) == 1


def test_a_structured_answer_is_an_object(chat: ChatOpenAI) -> None:
    structured = chat.with_structured_output(Answer, method="json_schema", include_raw=True)
    result: Any = structured.invoke(TALK)
    if result["raw"].response_metadata["finish_reason"] == "stop":
        assert isinstance(result["parsed"], Answer)
    else:
        assert result["parsing_error"] is not None


def test_a_tool_is_called(chat: ChatOpenAI) -> None:
    bound = chat.bind_tools([Answer], tool_choice="Answer", strict=True)
    answer = bound.invoke(TALK)
    if answer.response_metadata["finish_reason"] != "length":
        [call] = answer.tool_calls
        assert call["name"] == "Answer"
        Answer.model_validate(call["args"])
