"""vLLM's `return_token_ids`: all computed tokens, for training."""

from collections.abc import Callable
from typing import Any

import openai
import pytest

from packages.frontend.tests.api.openai.tool_chat import BODY, TWO, saying, tool_engine
from tercet.frontend.testing import FakeEngine, Token, serving
from tercet.protocol.messages.messages import TokenizedGenerateReqInput
from tercet.protocol.messages.values import FinishReason, FinishType, ModelLimits, unpack_ints

EngineOf = Callable[..., FakeEngine]
OpenAIOf = Callable[..., openai.AsyncOpenAI]

WANTED: dict[str, Any] = {"extra_body": {"return_token_ids": True}}
CHAT: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}]}
END = 258
"""The token that ends the output and is not part of its text."""


def ending(request: TokenizedGenerateReqInput, index: int) -> list[Token]:
    finish = FinishReason(FinishType.STOP, matched=END)
    return [Token(10 + index, "Hello"), Token(11, ""), Token(12, " you"), Token(END, "", finish)]


def prompt_of(request: TokenizedGenerateReqInput) -> list[int]:
    return list(unpack_ints(request.input_ids))


def told(model: Any, name: str) -> Any:
    return (model.model_extra or {}).get(name)


async def test_a_chat_has_its_prompt_s_beside_its_choices(engine_of: EngineOf, openai_of: OpenAIOf) -> None:
    async with serving(engine_of(ending)) as served:
        answer = await openai_of(served).chat.completions.create(**CHAT, **WANTED, n=2)
        plain = await openai_of(served).chat.completions.create(**CHAT)
        [request, _] = served.engine.requests()
    assert told(answer, "prompt_token_ids") == prompt_of(request)
    assert [told(choice, "token_ids") for choice in answer.choices] == [[10, 11, 12, END], [11, 11, 12, END]]
    assert (told(plain, "prompt_token_ids"), told(plain.choices[0], "token_ids")) == (None, None)


@pytest.mark.parametrize("logprobs", [False, True])
async def test_chunks_of_a_chat_add_up(logprobs: bool, engine_of: EngineOf, openai_of: OpenAIOf) -> None:
    async with serving(engine_of(ending)) as served:
        stream = await openai_of(served).chat.completions.create(**CHAT, **WANTED, n=2, stream=True, logprobs=logprobs)
        chunks = [chunk async for chunk in stream]
        [request] = served.engine.requests()
    for index in (0, 1):
        mine = [chunk for chunk in chunks if chunk.choices[0].index == index]
        assert [told(chunk, "prompt_token_ids") for chunk in mine] == [prompt_of(request), *[None] * (len(mine) - 1)]
        ids = [token_id for chunk in mine for token_id in told(chunk.choices[0], "token_ids") or []]
        assert ids == [10 + index, 11, 12, END]
        assert "".join(chunk.choices[0].delta.content or "" for chunk in mine) == "Hello you"


@pytest.mark.parametrize("stream", [False, True])
async def test_ids_of_calls_come_once_whatever_is_made_of_them(
    stream: bool, engine_of: EngineOf, openai_of: OpenAIOf, files: dict[str, bytes], limits: ModelLimits
) -> None:
    async with serving(tool_engine(engine_of, files, limits, script := saying(TWO))) as served:
        if stream:
            chunks = [
                chunk async for chunk in await openai_of(served).chat.completions.create(**BODY, **WANTED, stream=True)
            ]
            ids = [token_id for chunk in chunks for token_id in told(chunk.choices[0], "token_ids") or []]
            prompts = [told(chunk, "prompt_token_ids") for chunk in chunks]
            assert prompts[0]
            assert {*map(str, prompts[1:])} == {"None"}
        else:
            answer = await openai_of(served).chat.completions.create(**BODY, **WANTED)
            assert len(answer.choices[0].message.tool_calls or []) == 2
            ids = told(answer.choices[0], "token_ids")
        [request] = served.engine.requests()
    assert ids == [token.id for token in script(request, 0)]


@pytest.mark.parametrize("stream", [False, True])
async def test_each_completion_has_its_own_prompt_s(stream: bool, engine_of: EngineOf, openai_of: OpenAIOf) -> None:
    async with serving(engine_of(ending)) as served:
        asked: dict[str, Any] = {"model": "tiny", "prompt": ["hello", "the quick"], "n": 2, **WANTED}
        parts = [await openai_of(served).completions.create(**asked)]
        if stream:
            loose = openai_of(served, strict=False)
            parts = [part async for part in await loose.completions.create(**asked, stream=True)]
        requests = served.engine.requests()[-2:]
    for number in range(4):
        mine = [choice for part in parts for choice in part.choices if choice.index == number]
        prompts = [told(choice, "prompt_token_ids") for choice in mine]
        assert prompts == [prompt_of(requests[number // 2]), *[None] * (len(mine) - 1)]
        assert [token_id for choice in mine for token_id in told(choice, "token_ids")] == [10 + number % 2, 11, 12, END]


async def test_a_prompt_that_is_only_scored_has_no_output(engine_of: EngineOf, openai_of: OpenAIOf) -> None:
    async with serving(engine_of()) as served:
        answer = await openai_of(served).completions.create(
            model="tiny", prompt=[5, 6, 7], max_tokens=0, echo=True, **WANTED
        )
    assert told(answer.choices[0], "prompt_token_ids") == [5, 6, 7]
    assert told(answer.choices[0], "token_ids") == []
