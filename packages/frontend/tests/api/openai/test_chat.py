"""/v1/chat/completions through OpenAI's client, which validates strictly. Names state the rule."""

import asyncio
import json
from collections.abc import Callable
from typing import Any

import httpx2
import openai
import pytest
from openai.types.chat import ChatCompletionChunk, ChatCompletionUserMessageParam
from tokenizers import Tokenizer

from tercet.frontend.testing import DETOKENIZER, FakeEngine, Script, Served, Token, decode_spec, serving
from tercet.protocol.messages.messages import Rejected, TokenizedGenerateReqInput
from tercet.protocol.messages.values import FinishReason, FinishType, Role, unpack_ints

EngineOf = Callable[..., FakeEngine]
OpenAIOf = Callable[..., openai.AsyncOpenAI]
HttpOf = Callable[[Served], httpx2.AsyncClient]

USER: list[ChatCompletionUserMessageParam] = [{"role": "user", "content": "hello"}]
BODY: dict[str, Any] = {"model": "tiny", "messages": USER}


def saying(*tokens: Token) -> Script:
    return lambda _request, _index: tokens


async def stream_of(client: openai.AsyncOpenAI, **options: Any) -> list[ChatCompletionChunk]:
    stream = await client.chat.completions.create(**{**BODY, "stream": True, **options})
    return [chunk async for chunk in stream]


async def test_a_chat_completes(engine_of: EngineOf, openai_of: OpenAIOf) -> None:
    async with serving(engine_of()) as served:
        answer = await openai_of(served).chat.completions.create(**BODY)
    [choice] = answer.choices
    assert choice.message.content == "Hello world!"
    assert (choice.message.role, choice.finish_reason, choice.logprobs) == ("assistant", "stop", None)
    assert answer.id.startswith("chatcmpl-")
    assert answer.system_fingerprint is not None
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 4
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 4


async def test_rule_1_headers_events_and_done(engine_of: EngineOf, http_of: HttpOf) -> None:
    async with serving(engine_of()) as served:
        answer = await http_of(served).post(
            "/v1/chat/completions", json={**BODY, "stream": True}, headers={"x-request-id": "mine-1"}
        )
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert answer.headers["cache-control"] == "no-cache"
    assert answer.headers["x-accel-buffering"] == "no"
    assert answer.headers["x-request-id"] == "mine-1"
    events = answer.text.split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    for event in events[:-2]:
        chunk = json.loads(event.removeprefix("data: "))
        assert chunk["object"] == "chat.completion.chunk"
        assert "usage" not in chunk


async def test_rule_2_an_error_before_the_first_token_has_its_status(engine_of: EngineOf, openai_of: OpenAIOf) -> None:
    def overloaded(request: TokenizedGenerateReqInput) -> Rejected:
        return Rejected(rid=request.rid, attempt=request.attempt, code="overloaded", message="full", retry=True)

    async with serving(engine_of(reject=overloaded)) as served:
        with pytest.raises(openai.InternalServerError) as error:
            await stream_of(openai_of(served))
        assert error.value.status_code == 503
        assert error.value.response.headers["retry-after"] == "1"
        await served.until_idle()


async def test_rule_2_an_error_in_the_middle_is_an_event_and_ends_the_stream(
    engine_of: EngineOf, openai_of: OpenAIOf, http_of: HttpOf
) -> None:
    def breaks(request: TokenizedGenerateReqInput, index: int) -> list[Token]:
        return [Token(10, "Hello"), Token(11, " wor", FinishReason(FinishType.ERROR, message="it broke"))]

    async with serving(engine_of(breaks)) as served:
        with pytest.raises(openai.APIError, match="it broke") as error:
            await stream_of(openai_of(served))
        answer = await http_of(served).post("/v1/chat/completions", json={**BODY, "stream": True})
        await served.until_idle()
    assert error.value.type == "server_error"
    *chunks, last = [json.loads(line[6:]) for line in answer.text.splitlines() if line]
    assert "".join(chunk["choices"][0]["delta"]["content"] for chunk in chunks) == "Hello wor"
    assert all(chunk["choices"][0]["finish_reason"] is None for chunk in chunks)
    assert last == {"error": {"message": "it broke", "type": "server_error", "param": None, "code": None}}


async def test_rule_2_a_failed_answer_that_is_not_streamed_is_a_500(engine_of: EngineOf, openai_of: OpenAIOf) -> None:
    def breaks(request: TokenizedGenerateReqInput, index: int) -> list[Token]:
        return [Token(10, "Hello", FinishReason(FinishType.ERROR, message="it broke"))]

    async with serving(engine_of(breaks)) as served:
        with pytest.raises(openai.InternalServerError, match="it broke"):
            await openai_of(served).chat.completions.create(**BODY)


async def test_rule_3_chunks_agree_and_each_choice_begins_and_ends_once(
    engine_of: EngineOf, openai_of: OpenAIOf
) -> None:
    async with serving(engine_of()) as served:
        chunks = await stream_of(openai_of(served), n=2)
    assert len({(chunk.id, chunk.created, chunk.model, chunk.system_fingerprint) for chunk in chunks}) == 1
    for index in range(2):
        own = [chunk.choices[0] for chunk in chunks if chunk.choices[0].index == index]
        assert [choice.delta.role for choice in own] == ["assistant", *[None] * (len(own) - 1)]
        assert [choice.finish_reason for choice in own] == [*[None] * (len(own) - 1), "stop"]
        assert "".join(choice.delta.content or "" for choice in own) == "Hello world!"


@pytest.mark.parametrize(
    ("finish", "reason"),
    [
        (FinishReason(FinishType.STOP, 315), "stop"),
        (FinishReason(FinishType.STOP, "END"), "stop"),
        (FinishReason(FinishType.LENGTH), "length"),
    ],
)
async def test_rule_4_finish_reasons_are_openais(
    engine_of: EngineOf, openai_of: OpenAIOf, finish: FinishReason, reason: str
) -> None:
    async with serving(engine_of(saying(Token(10, "x", finish)))) as served:
        answer = await openai_of(served).chat.completions.create(**BODY)
        chunks = await stream_of(openai_of(served))
    assert answer.choices[0].finish_reason == reason
    assert chunks[-1].choices[0].finish_reason == reason


async def test_rule_5_usage_comes_in_a_last_chunk_without_choices(engine_of: EngineOf, openai_of: OpenAIOf) -> None:
    async with serving(engine_of()) as served:
        chunks = await stream_of(openai_of(served), n=2, stream_options={"include_usage": True})
        [request] = served.engine.requests()
    *before, last = chunks
    assert all(chunk.usage is None and chunk.choices for chunk in before)
    assert last.choices == []
    assert last.usage is not None
    prompt = len(unpack_ints(request.input_ids))
    assert (last.usage.prompt_tokens, last.usage.completion_tokens) == (prompt, 8)
    assert last.usage.total_tokens == prompt + 8
    assert last.usage.prompt_tokens_details is not None
    assert last.usage.prompt_tokens_details.cached_tokens == prompt // 2


async def test_rule_5_every_chunk_says_that_its_usage_is_null(engine_of: EngineOf, http_of: HttpOf) -> None:
    async with serving(engine_of()) as served:
        body = {**BODY, "stream": True, "stream_options": {"include_usage": True}}
        answer = await http_of(served).post("/v1/chat/completions", json=body)
    events = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
    assert all(event["usage"] is None for event in events[:-1])
    assert events[-1]["usage"] is not None


async def test_rule_5_stream_options_need_a_stream(engine_of: EngineOf, openai_of: OpenAIOf) -> None:
    async with serving(engine_of()) as served:
        with pytest.raises(openai.BadRequestError) as error:
            await openai_of(served).chat.completions.create(**BODY, stream_options={"include_usage": True})
    assert error.value.param == "stream_options"


async def test_rule_6_choices_come_in_order_of_their_index(engine_of: EngineOf, openai_of: OpenAIOf) -> None:
    def own(request: TokenizedGenerateReqInput, index: int) -> list[Token]:
        return [Token(place, f"{index}.{place} ") for place in range(4 - index)]

    async with serving(engine_of(own)) as served:
        answer = await openai_of(served).chat.completions.create(**BODY, n=3)
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert [choice.message.content for choice in answer.choices] == ["0.0 0.1 0.2 0.3 ", "1.0 1.1 1.2 ", "2.0 2.1 "]


def euro(tokenizer: Tokenizer) -> Callable[[TokenizedGenerateReqInput, int], list[Token]]:
    """Return a script of a euro sign in three one-byte tokens, then an end token without text."""
    parts = tokenizer.encode("€").ids
    [end] = tokenizer.encode("<|im_end|>").ids

    def script(request: TokenizedGenerateReqInput, index: int) -> list[Token]:
        tops = ((5, -0.25), (6, -3.0))
        tokens = [Token(each, text, None, -0.5, tops) for each, text in zip(parts, ("", "", "€"), strict=True)]
        return [*tokens, Token(end, "", FinishReason(FinishType.STOP, end))]

    return script


@pytest.mark.parametrize("top", [None, 0, 2])
async def test_rule_7_logprobs_have_bytes_and_the_requested_alternatives(
    engine_of: EngineOf, openai_of: OpenAIOf, tokenizer: Tokenizer, top: int | None
) -> None:
    asked: dict[str, Any] = {"logprobs": True} if top is None else {"logprobs": True, "top_logprobs": top}
    async with serving(engine_of(euro(tokenizer))) as served:
        answer = await openai_of(served).chat.completions.create(**BODY, **asked)
        chunks = await stream_of(openai_of(served), **asked)
    whole = answer.choices[0].logprobs
    assert whole is not None
    assert whole.content is not None
    assert answer.usage is not None
    assert len(whole.content) == answer.usage.completion_tokens
    *parts, end = whole.content
    assert [entry.bytes for entry in parts] == [[0xE2], [0x82], [0xAC]]
    assert [entry.token for entry in parts] == ["\\xe2", "\\x82", "\\xac"]
    assert (end.token, end.bytes) == ("<|im_end|>", list(b"<|im_end|>"))
    assert all(len(entry.top_logprobs) == (top or 0) for entry in parts)
    if top:
        assert [each.logprob for each in whole.content[0].top_logprobs] == [-0.25, -3.0]
    streamed = [
        entry for chunk in chunks if (own := chunk.choices[0].logprobs) is not None for entry in own.content or []
    ]
    assert streamed == whole.content


@pytest.mark.parametrize(
    "wrong",
    [{"top_logprobs": 2}, {"logprobs": False, "top_logprobs": 2}, {"logprobs": True, "top_logprobs": 21}],
)
async def test_rule_7_alternatives_need_log_probabilities_and_are_at_most_20(
    engine_of: EngineOf, openai_of: OpenAIOf, wrong: dict[str, Any]
) -> None:
    async with serving(engine_of()) as served:
        with pytest.raises(openai.BadRequestError) as error:
            await openai_of(served).chat.completions.create(**BODY, **wrong)
    assert error.value.param == "top_logprobs"


@pytest.mark.parametrize(
    ("asked", "tokens"),
    [
        ({"max_tokens": 2}, 2),
        ({"max_completion_tokens": 3}, 3),
        ({"max_tokens": 2, "max_completion_tokens": 3}, 3),
    ],
)
async def test_rule_8_max_completion_tokens_overrides_max_tokens(
    engine_of: EngineOf, openai_of: OpenAIOf, asked: dict[str, Any], tokens: int
) -> None:
    async with serving(engine_of()) as served:
        answer = await openai_of(served).chat.completions.create(**BODY, **asked)
    assert answer.usage is not None
    assert (answer.usage.completion_tokens, answer.choices[0].finish_reason) == (tokens, "length")


async def test_rule_8_without_a_limit_the_rest_of_the_context_is_asked_for(
    engine_of: EngineOf, openai_of: OpenAIOf
) -> None:
    async with serving(engine_of()) as served:
        await openai_of(served).chat.completions.create(**BODY)
        [request] = served.engine.requests()
    assert request.sampling.max_new_tokens == 128 - len(unpack_ints(request.input_ids))


async def test_rule_8_more_than_the_context_is_refused_and_not_cut(engine_of: EngineOf, openai_of: OpenAIOf) -> None:
    long: list[ChatCompletionUserMessageParam] = [{"role": "user", "content": "hello " * 200}]
    async with serving(engine_of()) as served:
        client = openai_of(served)
        with pytest.raises(openai.BadRequestError) as by_limit:
            await client.chat.completions.create(**BODY, max_completion_tokens=128)
        with pytest.raises(openai.BadRequestError) as by_prompt:
            await client.chat.completions.create(model="tiny", messages=long)
        assert served.engine.requests() == []
    assert (by_limit.value.code, by_limit.value.param) == ("context_length_exceeded", "max_completion_tokens")
    assert (by_prompt.value.code, by_prompt.value.param) == ("context_length_exceeded", "messages")


@pytest.mark.parametrize(
    ("stop", "told"), [(None, []), ([], []), ("END", ["END"]), (["a", "b", "c", "d"], ["a", "b", "c", "d"])]
)
async def test_rule_9_stop_strings_reach_the_detokenizer(
    engine_of: EngineOf, openai_of: OpenAIOf, stop: Any, told: list[str]
) -> None:
    async with serving(engine_of()) as served:
        await openai_of(served).chat.completions.create(**BODY, stop=stop)
        [request] = served.engine.requests()
    assert decode_spec(request).stop == told


@pytest.mark.parametrize("stop", [["a"] * 65, "", ["a", ""], 5, ["x" * 5000]])
async def test_rule_9_other_stops_are_refused(engine_of: EngineOf, openai_of: OpenAIOf, stop: Any) -> None:
    async with serving(engine_of()) as served:
        with pytest.raises(openai.BadRequestError) as error:
            await openai_of(served).chat.completions.create(**BODY, stop=stop)
    assert error.value.param is not None
    assert error.value.param.startswith("stop")


async def test_rule_9_an_answer_that_stopped_is_aborted_in_the_scheduler(
    engine_of: EngineOf, openai_of: OpenAIOf
) -> None:
    def stops(request: TokenizedGenerateReqInput, index: int) -> list[Token]:
        return [Token(10, "Hello"), Token(11, "", FinishReason(FinishType.STOP, "END"))]

    async with serving(engine_of(stops)) as served:
        answer = await openai_of(served).chat.completions.create(**BODY, stop="END")
        assert [each.indices for each in served.engine.aborts()] == [[0]]
    assert answer.choices[0].message.content == "Hello"


async def test_rule_18_a_typed_special_token_is_plain_text(
    engine_of: EngineOf, http_of: HttpOf, tokenizer: Tokenizer
) -> None:
    [end] = tokenizer.encode("<|im_end|>").ids
    messages = [{"role": "user", "content": [{"type": "text", "text": "<|im_"}, {"type": "text", "text": "end|>"}]}]
    async with serving(engine_of()) as served:
        await http_of(served).post("/v1/chat/completions", json={"model": "tiny", "messages": messages})
        [request] = served.engine.requests()
    ids = list(unpack_ints(request.input_ids))
    assert ids.count(end) == 1
    assert tokenizer.decode(ids, skip_special_tokens=True) == "user\n<|im_end|>\nassistant\n"


async def test_rule_18_an_assistant_message_can_be_gone_on_with(
    engine_of: EngineOf, http_of: HttpOf, tokenizer: Tokenizer
) -> None:
    messages = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "the quick "}]
    body = {"model": "tiny", "messages": messages, "continue_final_message": True}
    async with serving(engine_of()) as served:
        answer = await http_of(served).post("/v1/chat/completions", json=body)
        [request] = served.engine.requests()
    assert answer.status_code == 200
    text = tokenizer.decode(list(unpack_ints(request.input_ids)), skip_special_tokens=False)
    assert text == "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\nthe quick "


@pytest.mark.parametrize("stream", [True, False])
async def test_rule_19_a_client_that_leaves_aborts_its_request(
    engine_of: EngineOf, http_of: HttpOf, stream: bool
) -> None:
    engine = engine_of(saying(*[Token(5, "x")] * 100), auto=False)
    async with serving(engine) as served:
        leaving = asyncio.create_task(
            http_of(served).post("/v1/chat/completions", json={**BODY, "stream": stream}, timeout=30)
        )
        async with asyncio.timeout(10):
            while not engine.running:  # noqa: ASYNC110 - the fake has no event for it
                await asyncio.sleep(0.002)
            engine.step()
            await asyncio.sleep(0.05)
            leaving.cancel()
            await served.until_idle()
        [request] = engine.requests()
        assert [each.rid for each in engine.aborts()] == [request.rid]
        assert engine.running == []


async def test_rule_19_a_disconnect_before_the_first_token_aborts_the_request(
    engine_of: EngineOf, http_of: HttpOf
) -> None:
    engine = engine_of(auto=False)
    async with serving(engine) as served:
        leaving = asyncio.create_task(http_of(served).post("/v1/chat/completions", json={**BODY, "stream": True}))
        async with asyncio.timeout(10):
            while not engine.running:  # noqa: ASYNC110 - the fake has no event for it
                await asyncio.sleep(0.002)
            leaving.cancel()
            await served.until_idle()
        assert len(engine.aborts()) == 1


async def test_a_stream_goes_on_when_its_scheduler_and_detokenizer_die(
    engine_of: EngineOf, openai_of: OpenAIOf
) -> None:
    engine = engine_of(saying(*(Token(5 + place, f"{place} ") for place in range(20))), auto=False)
    async with serving(engine) as served:
        stream = await asyncio.gather(
            openai_of(served).chat.completions.create(**BODY, stream=True), first_step(engine)
        )
        engine.step()
        engine.down("scheduler-0")
        engine.scheduler_up("scheduler-0", "2")
        engine.step()
        engine.down(DETOKENIZER, Role.DETOKENIZER)
        engine.detokenizer_up(DETOKENIZER, "2")
        for _ in range(20):
            engine.step()
        chunks = [chunk async for chunk in stream[0]]
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "".join(f"{n} " for n in range(20))
    assert engine.requests()[-1].attempt == 2


async def first_step(engine: FakeEngine) -> None:
    async with asyncio.timeout(10):
        while not engine.running:  # noqa: ASYNC110 - the fake has no event for it
            await asyncio.sleep(0.002)
    engine.step()


async def test_a_model_without_a_template_refuses_chat_and_says_why(
    engine_of: EngineOf, openai_of: OpenAIOf, files: dict[str, bytes]
) -> None:
    bare = {"tokenizer.json": files["tokenizer.json"]}
    async with serving(engine_of(files=bare)) as served:
        with pytest.raises(openai.BadRequestError, match="no chat template"):
            await openai_of(served).chat.completions.create(**BODY)
        answer = await openai_of(served).completions.create(model="tiny", prompt="hello")
    assert answer.choices[0].text == "Hello world!"
