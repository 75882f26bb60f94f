"""Helpers of the tests with tools in chats: a model with a Hermes template, and merged streams."""

from collections.abc import Callable
from typing import Any

import httpx2
import msgspec
import openai
from openai.types.chat import ChatCompletionChunk, ChatCompletionMessage

from tercet.frontend.testing import FakeEngine, Script, Served, Token
from tercet.protocol.messages.messages import TokenizedGenerateReqInput
from tercet.protocol.messages.values import FinishReason, ModelLimits, unpack_ints

EngineOf = Callable[..., FakeEngine]
OpenAIOf = Callable[..., openai.AsyncOpenAI]
HttpOf = Callable[[Served], httpx2.AsyncClient]

TEMPLATE = (
    "{% if tools %}<tools>{% for tool in tools %}{{ tool | tojson }}{% endfor %}</tools>{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{% for call in m.tool_calls or [] %}"
    '<tool_call>{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}</tool_call>'
    "{% endfor %}<|im_end|>\n{% endfor %}<|im_start|>assistant\n"
)
WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather of a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
NOW: dict[str, Any] = {"type": "function", "function": {"name": "now"}}
BODY: dict[str, Any] = {
    "model": "tiny",
    "messages": [{"role": "user", "content": "Weather?"}],
    "tools": [WEATHER, NOW],
    "max_tokens": 64,
}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
TWO = CALL + '\n<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'


def saying(text: str, finish: FinishReason | None = None, size: int = 4) -> Script:
    """Return a script of the text in pieces of equal length."""
    parts = [text[at : at + size] for at in range(0, len(text), size)]
    tokens = [Token(20 + place % 200, part) for place, part in enumerate(parts)]
    if finish is not None:
        tokens[-1] = Token(tokens[-1].id, tokens[-1].text, finish)
    return lambda _request, _index: tokens


async def stream_of(client: openai.AsyncOpenAI, **options: Any) -> list[ChatCompletionChunk]:
    stream = await client.chat.completions.create(**{**BODY, "stream": True, **options})
    return [chunk async for chunk in stream]


class Streamed:
    """Chunks of a choice, merged as clients do."""

    def __init__(self, chunks: list[ChatCompletionChunk], index: int = 0, reasoning: str = "reasoning_content") -> None:
        self.content: str | None = None
        self.reasoning: str | None = None
        self.calls: list[dict[str, Any]] = []
        self.finishes: list[str] = []
        for choice in (each for chunk in chunks for each in chunk.choices if each.index == index):
            if choice.delta.content is not None:
                self.content = (self.content or "") + choice.delta.content
            if (more := getattr(choice.delta, reasoning, None)) is not None:
                self.reasoning = (self.reasoning or "") + more
            for delta in choice.delta.tool_calls or []:
                assert delta.function is not None
                if delta.id is not None:
                    assert (delta.index, delta.type, delta.function.arguments) == (len(self.calls), "function", "")
                    self.calls.append({"id": delta.id, "name": delta.function.name, "arguments": ""})
                else:
                    assert (delta.type, delta.function.name) == (None, None)
                    self.calls[delta.index]["arguments"] += delta.function.arguments
            if choice.finish_reason is not None:
                self.finishes.append(choice.finish_reason)

    def pairs(self) -> list[tuple[str, str]]:
        return [(call["name"], call["arguments"]) for call in self.calls]


def pairs(message: ChatCompletionMessage) -> list[tuple[str, str]]:
    calls = message.tool_calls or []
    assert len({call.id for call in calls}) == len(calls)
    return [(call.function.name, call.function.arguments) for call in calls if call.type == "function"]


def tool_engine(
    engine_of: EngineOf, files: dict[str, bytes], limits: ModelLimits, script: Script, template: str = TEMPLATE
) -> FakeEngine:
    """Return an engine whose model has this template and enough context for its tools."""
    roomy = msgspec.structs.replace(limits, context_length=2048)
    return engine_of(script, files={**files, "chat_template.jinja": template.encode()}, limits=roomy)


def prompt_of(served: Served, request: TokenizedGenerateReqInput | None = None) -> str:
    """Return the text of the prompt of a request; by default of the last one."""
    [model] = served.manager.models
    request = request or served.engine.requests()[-1]
    return model.tokenizer.decode(list(unpack_ints(request.input_ids)), skip_special_tokens=False)
