"""/v1/chat/completions through OpenAI's own client, which validates strictly. Names say the rule."""

from collections.abc import Callable

import openai
from openai.types.chat import ChatCompletionUserMessageParam

from tercet.frontend.testing import FakeEngine, Served, serving

EngineOf = Callable[..., FakeEngine]
OpenAIOf = Callable[[Served], openai.AsyncOpenAI]

USER: list[ChatCompletionUserMessageParam] = [{"role": "user", "content": "hello"}]


async def test_a_chat_completes(engine_of: EngineOf, openai_of: OpenAIOf) -> None:
    async with serving(engine_of()) as served:
        answer = await openai_of(served).chat.completions.create(model="tiny", messages=USER)
    assert answer.choices[0].message.content == "Hello world!"
    assert answer.choices[0].finish_reason == "stop"


async def test_a_chat_streams(engine_of: EngineOf, openai_of: OpenAIOf) -> None:
    async with serving(engine_of()) as served:
        stream = await openai_of(served).chat.completions.create(model="tiny", messages=USER, stream=True)
        chunks = [chunk async for chunk in stream]
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "Hello world!"
