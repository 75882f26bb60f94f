"""Tool calls in chat responses, through OpenAI's client, which validates strictly."""

from collections.abc import Callable
from functools import partial
from typing import Any

import openai
import pytest

from packages.frontend.tests.api.openai.tool_chat import (
    BODY,
    CALL,
    TEMPLATE,
    TWO,
    WEATHER,
    EngineOf,
    OpenAIOf,
    Streamed,
    pairs,
    saying,
    stream_of,
    tool_engine,
)
from packages.frontend.tests.parsers.transcripts import TRANSCRIPTS, Transcript
from tercet.frontend.config.config import ServingConfig
from tercet.frontend.testing import FakeEngine, decode_spec, serving
from tercet.protocol.messages.messages import TokenizedGenerateReqInput
from tercet.protocol.messages.values import FinishReason, FinishType, ModelLimits


@pytest.fixture
def model_saying(engine_of: EngineOf, files: dict[str, bytes], limits: ModelLimits) -> Callable[..., FakeEngine]:
    return partial(tool_engine, engine_of, files, limits)


async def test_rule_11_calls_have_ids_json_and_a_finish_of_their_own(
    model_saying: EngineOf, openai_of: OpenAIOf
) -> None:
    async with serving(model_saying(saying(TWO))) as served:
        answer = await openai_of(served).chat.completions.create(**BODY)
        chunks = await stream_of(openai_of(served))
    [choice] = answer.choices
    expected = [("get_weather", '{"city": "Oslo"}'), ("now", "{}")]
    assert (choice.message.content, choice.finish_reason) == (None, "tool_calls")
    assert pairs(choice.message) == expected
    streamed = Streamed(chunks)
    assert (streamed.content, streamed.finishes, streamed.pairs()) == (None, ["tool_calls"], expected)
    assert all(call["id"].startswith("call_") for call in streamed.calls)


FIRSTS = {transcript.names: transcript for transcript in reversed(TRANSCRIPTS)}
"""One transcript of each notation. Tests of the parsers show that cuts change nothing."""


@pytest.mark.parametrize("transcript", FIRSTS.values(), ids=lambda transcript: transcript.title)
async def test_streamed_and_plain_answers_are_equal_in_every_notation(
    model_saying: EngineOf, openai_of: OpenAIOf, transcript: Transcript
) -> None:
    names = transcript.names
    config = ServingConfig(tool_call_parser=names.tools or "none", reasoning_parser=names.reasoning or "none")
    tools = [{"type": "function", "function": {"name": name}} for name in ("get_weather", "now", "save")]
    options: dict[str, Any] = {"tools": tools if names.tools else openai.NOT_GIVEN, "max_tokens": 1000}
    if transcript.prompt:
        options["messages"] = [{"role": "user", "content": "x"}]
    template = TEMPLATE + transcript.prompt
    async with serving(model_saying(saying(transcript.output, size=7), template), config=config) as served:
        answer = await openai_of(served).chat.completions.create(**{**BODY, **options})
        chunks = await stream_of(openai_of(served), **options)
    message = answer.choices[0].message
    streamed = Streamed(chunks)
    assert (streamed.content or "") == (message.content or "")
    assert (streamed.reasoning or "") == getattr(message, "reasoning_content", "")
    assert streamed.pairs() == pairs(message)
    assert streamed.finishes == [answer.choices[0].finish_reason]


async def test_text_beside_calls_is_kept_unless_it_is_blank(model_saying: EngineOf, openai_of: OpenAIOf) -> None:
    async with serving(model_saying(saying(f"Let me look.\n{CALL}"))) as served:
        said = await openai_of(served).chat.completions.create(**BODY)
    assert said.choices[0].message.content == "Let me look."
    async with serving(model_saying(saying(f"\n\n{CALL}\n"))) as served:
        blank = await openai_of(served).chat.completions.create(**BODY)
        chunks = await stream_of(openai_of(served))
    assert blank.choices[0].message.content is None
    assert Streamed(chunks).content is None


async def test_a_call_that_is_cut_off_finishes_with_length(model_saying: EngineOf, openai_of: OpenAIOf) -> None:
    async with serving(model_saying(saying(CALL, size=8))) as served:
        answer = await openai_of(served).chat.completions.create(**{**BODY, "max_tokens": 7})
        chunks = await stream_of(openai_of(served), max_tokens=7)
    assert answer.choices[0].finish_reason == "length"
    assert Streamed(chunks).finishes == ["length"]
    assert Streamed(chunks).pairs() == pairs(answer.choices[0].message)


async def test_a_call_that_is_cut_off_in_its_head_is_no_content(model_saying: EngineOf, openai_of: OpenAIOf) -> None:
    async with serving(model_saying(saying(f"Right. {CALL}", size=8))) as served:
        answer = await openai_of(served).chat.completions.create(**{**BODY, "max_tokens": 5})
        chunks = await stream_of(openai_of(served), max_tokens=5)
    message = answer.choices[0].message
    assert (message.content, pairs(message)) == (Streamed(chunks).content, Streamed(chunks).pairs()) == ("Right. ", [])


async def test_without_a_call_the_answer_is_text(model_saying: EngineOf, openai_of: OpenAIOf) -> None:
    async with serving(model_saying(saying("Sunny, I guess."))) as served:
        answer = await openai_of(served).chat.completions.create(**BODY)
        [request] = served.engine.requests()
    assert answer.choices[0].message.content == "Sunny, I guess."
    assert answer.choices[0].message.tool_calls is None
    assert answer.choices[0].finish_reason == "stop"
    assert request.sampling.grammar is None


async def test_each_of_n_choices_has_its_own_calls(model_saying: EngineOf, openai_of: OpenAIOf) -> None:
    def script(request: TokenizedGenerateReqInput, index: int) -> Any:
        return saying([CALL, "Just words."][index])(request, index)

    async with serving(model_saying(script)) as served:
        answer = await openai_of(served).chat.completions.create(**{**BODY, "n": 2})
        chunks = await stream_of(openai_of(served), n=2)
    assert [choice.finish_reason for choice in answer.choices] == ["tool_calls", "stop"]
    assert [len(choice.message.tool_calls or []) for choice in answer.choices] == [1, 0]
    assert Streamed(chunks, 0).pairs() == [("get_weather", '{"city": "Oslo"}')]
    assert (Streamed(chunks, 1).content, Streamed(chunks, 1).finishes) == ("Just words.", ["stop"])


async def test_one_call_at_most_without_parallel_calls(model_saying: EngineOf, openai_of: OpenAIOf) -> None:
    async with serving(model_saying(saying(TWO))) as served:
        answer = await openai_of(served).chat.completions.create(**{**BODY, "parallel_tool_calls": False})
        chunks = await stream_of(openai_of(served), parallel_tool_calls=False)
    assert pairs(answer.choices[0].message) == [("get_weather", '{"city": "Oslo"}')]
    assert Streamed(chunks).pairs() == [("get_weather", '{"city": "Oslo"}')]


async def test_functions_are_called_as_functions(model_saying: EngineOf, openai_of: OpenAIOf) -> None:
    options = {"tools": openai.NOT_GIVEN, "functions": [WEATHER["function"]]}
    async with serving(model_saying(saying(TWO))) as served:
        answer = await openai_of(served).chat.completions.create(**{**BODY, **options})
        chunks = await stream_of(openai_of(served), **options)
        named = await openai_of(served).chat.completions.create(
            **{**BODY, **options, "function_call": {"name": "get_weather"}}
        )
    message = answer.choices[0].message
    assert answer.choices[0].finish_reason == "function_call"
    assert message.tool_calls is None
    assert message.function_call is not None
    assert (message.function_call.name, message.function_call.arguments) == ("get_weather", '{"city": "Oslo"}')
    deltas = [chunk.choices[0].delta.function_call for chunk in chunks]
    assert [each.name for each in deltas if each and each.name] == ["get_weather"]
    assert "".join(each.arguments or "" for each in deltas if each) == '{"city": "Oslo"}'
    assert chunks[-1].choices[0].finish_reason == "function_call"
    assert named.choices[0].finish_reason == "stop"


async def test_markers_that_are_special_tokens_are_decoded_and_others_go(
    model_saying: EngineOf, openai_of: OpenAIOf
) -> None:
    call = "[TOOL_CALLS]now[ARGS]{}"
    async with serving(
        model_saying(saying("Hi <s>there. " + call)), config=ServingConfig(tool_call_parser="mistral")
    ) as served:
        answer = await openai_of(served).chat.completions.create(**BODY)
        await openai_of(served).chat.completions.create(**{**BODY, "tools": openai.NOT_GIVEN})
        with_tools, without = served.engine.requests()
    assert answer.choices[0].message.content == "Hi there. "
    assert not decode_spec(with_tools).skip_special_tokens
    assert not decode_spec(with_tools).stops_in_special_tokens, "the client sees none of them"
    assert decode_spec(without).skip_special_tokens
    assert answer.choices[0].message.tool_calls is not None
    assert len(answer.choices[0].message.tool_calls[0].id) == 9


async def test_logprobs_are_of_every_token_whatever_it_means(model_saying: EngineOf, openai_of: OpenAIOf) -> None:
    async with serving(model_saying(saying(CALL))) as served:
        answer = await openai_of(served).chat.completions.create(**{**BODY, "logprobs": True})
        chunks = await stream_of(openai_of(served), logprobs=True)
    scored = answer.choices[0].logprobs
    assert scored is not None
    assert scored.content is not None
    assert answer.usage is not None
    assert len(scored.content) == answer.usage.completion_tokens
    streamed = [each for chunk in chunks if (logprobs := chunk.choices[0].logprobs) for each in logprobs.content or []]
    assert [each.token for each in streamed] == [each.token for each in scored.content]


async def test_an_answer_that_a_stop_string_ends_is_no_call(model_saying: EngineOf, openai_of: OpenAIOf) -> None:
    finish = FinishReason(FinishType.STOP, "<END>")
    async with serving(model_saying(saying("Some words", finish))) as served:
        answer = await openai_of(served).chat.completions.create(**{**BODY, "stop": "<END>"})
    assert (answer.choices[0].finish_reason, answer.choices[0].message.content) == ("stop", "Some words")


async def test_a_call_that_a_stop_string_cuts_off_is_nothing_to_be_called(
    model_saying: EngineOf, openai_of: OpenAIOf
) -> None:
    cut = CALL[: CALL.index("Oslo")]
    async with serving(model_saying(saying(cut, FinishReason(FinishType.STOP, "Oslo")))) as served:
        answer = await openai_of(served).chat.completions.create(**{**BODY, "stop": "Oslo"})
        chunks = await stream_of(openai_of(served), stop="Oslo")
    assert answer.choices[0].finish_reason == "stop"
    assert Streamed(chunks).finishes == ["stop"]
    assert Streamed(chunks).pairs() == pairs(answer.choices[0].message) == [("get_weather", '{"city": "')]
