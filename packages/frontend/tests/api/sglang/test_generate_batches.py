"""Prompts of one /generate with options of their own, the text of scored tokens, and aborted requests."""

import asyncio
import json
from collections.abc import Callable
from typing import Any

import httpx2
import pytest

from tercet.frontend.api.sglang import generate
from tercet.frontend.constraints import Constraint, Tokens
from tercet.frontend.structured_output.compiler import to_grammar
from tercet.frontend.testing import FakeEngine, Served, Token, decode_spec, serving
from tercet.protocol.messages.messages import TokenizedGenerateReqInput
from tercet.protocol.messages.values import FinishReason, FinishType, Grammar

EngineOf = Callable[..., FakeEngine]
HttpOf = Callable[[Served], httpx2.AsyncClient]


def endless(_request: TokenizedGenerateReqInput, _index: int) -> list[Token]:
    return [Token(10 + place, f"{place},") for place in range(100)]


async def until_dispatched(engine: FakeEngine, count: int) -> None:
    while len(engine.requests()) < count:  # noqa: ASYNC110 - the engine does not report its requests
        await asyncio.sleep(0.001)


async def test_each_prompt_has_its_own_options(engine_of: EngineOf, http_of: HttpOf) -> None:
    body = {
        "text": ["hello", "world"],
        "sampling_params": [{"max_new_tokens": 1, "stop": ["x"]}, {"max_new_tokens": 2, "n": 2, "temperature": 0}],
        "return_logprob": [True, False],
        "top_logprobs_num": [1, 0],
        "logprob_start_len": [0, -1],
    }
    async with serving(engine_of()) as served:
        http = http_of(served)
        whole = (await http.post("/generate", json=body)).json()
        first, second = served.engine.requests()
        streamed = await http.post("/generate", json={**body, "stream": True})
    assert [each["index"] for each in whole] == [0, 1, 2]
    assert [each["text"] for each in whole] == ["Hello", "Hello wor", "Hello wor"]
    assert ["output_token_logprobs" in each["meta_info"] for each in whole] == [True, False, False]
    assert len(whole[0]["meta_info"]["input_token_logprobs"]) == whole[0]["meta_info"]["prompt_tokens"]
    assert (decode_spec(first).stop, decode_spec(second).stop) == (["x"], [])
    assert (first.sampling.n, second.sampling.n, second.sampling.temperature) == (1, 2, 0)
    last = {event["index"]: event["text"] for event in events_of(streamed)}
    assert last == {each["index"]: each["text"] for each in whole}


def events_of(answer: httpx2.Response) -> list[dict[str, Any]]:
    return [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"sampling_params": [{}, {"min_new_tokens": 9, "max_new_tokens": 8}]}, "sampling_params[1].min_new_tokens"),
        ({"sampling_params": [{}, {"regex": "("}]}, "sampling_params[1].regex"),
        ({"sampling_params": [{}, {"temperature": -1}]}, "sampling_params[1].temperature"),
        ({"sampling_params": {"n": 2000}}, "sampling_params.n"),
        ({"sampling_params": [{}]}, "sampling_params"),
        ({"return_logprob": [True]}, "return_logprob"),
        ({"top_logprobs_num": [1, 21]}, "top_logprobs_num[1]"),
        ({"return_logprob": True, "logprob_start_len": [0, 99]}, "logprob_start_len[1]"),
        ({"return_logprob": True, "logprob_start_len": 99}, "logprob_start_len"),
    ],
)
async def test_a_fault_of_one_prompt_is_named(
    engine_of: EngineOf, http_of: HttpOf, fields: dict[str, Any], param: str
) -> None:
    async with serving(engine_of()) as served:
        answer = await http_of(served).post("/generate", json={"text": ["hello", "world"], **fields})
        assert served.engine.requests() == []
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


async def test_each_prompt_may_have_its_own_grammar(engine_of: EngineOf, http_of: HttpOf) -> None:
    patterns = [f"a{{{1 + place}}}" for place in range(100)]
    body = {"text": ["hello"] * 100, "sampling_params": [{"regex": each, "max_new_tokens": 1} for each in patterns]}
    async with serving(engine_of()) as served:
        answer = await http_of(served).post("/generate", json=body)
        sent = [each.sampling.grammar.text for each in served.engine.requests() if each.sampling.grammar is not None]
    assert answer.status_code == 200
    assert sent == patterns


async def test_a_grammar_that_prompts_share_is_translated_once(
    engine_of: EngineOf, http_of: HttpOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    translated: list[Constraint] = []

    def counted(constraint: Constraint, tokens: Tokens) -> Grammar:
        translated.append(constraint)
        return to_grammar(constraint, tokens)

    monkeypatch.setattr(generate, "to_grammar", counted)
    body = {"text": ["hello"] * 3, "sampling_params": {"regex": "a+", "max_new_tokens": 1}}
    async with serving(engine_of()) as served:
        answer = await http_of(served).post("/generate", json=body)
        sent = [each.sampling.grammar.text for each in served.engine.requests() if each.sampling.grammar is not None]
    assert answer.status_code == 200
    assert (len(translated), sent) == (1, ["a+"] * 3)


async def test_a_list_of_options_goes_with_a_list_of_prompts(engine_of: EngineOf, http_of: HttpOf) -> None:
    async with serving(engine_of()) as served:
        answer = await http_of(served).post("/generate", json={"text": "hello", "sampling_params": [{}]})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "sampling_params")


async def test_scored_tokens_have_their_text_on_request(engine_of: EngineOf, http_of: HttpOf) -> None:
    body = {
        "text": "hello",
        "return_logprob": True,
        "logprob_start_len": 0,
        "top_logprobs_num": 1,
        "return_text_in_logprobs": True,
    }
    async with serving(engine_of()) as served:
        answer = (await http_of(served).post("/generate", json=body)).json()
        tokenizer = served.manager.models.get("tiny").tokenizer
        names = {each: tokenizer.decode([each], skip_special_tokens=False) for each in range(318)}
    meta = answer["meta_info"]
    rows = [*meta["input_token_logprobs"], *meta["output_token_logprobs"]]
    rows += [row for each in meta["output_top_logprobs"] for row in each]
    assert len(rows) > 8
    assert [text for _, _, text in rows] == [names[each] for _, each, _ in rows]


@pytest.mark.parametrize("stream", [False, True])
async def test_an_aborted_request_gives_its_output(engine_of: EngineOf, http_of: HttpOf, stream: bool) -> None:
    engine = engine_of(endless, auto=False)
    async with serving(engine) as served:
        http = http_of(served)
        body = {"text": "hello", "return_logprob": True, "stream": stream, "sampling_params": {"n": 2}}
        asked = asyncio.create_task(http.post("/generate", json=body))
        await until_dispatched(engine, 1)
        engine.step()
        engine.step()
        await http.post("/abort_request", json={"rid": engine.requests()[0].rid})
        answer = await asked
        await served.until_idle()
    assert answer.status_code == 200
    found = {each["index"]: each for each in (events_of(answer) if stream else answer.json())}
    for each in found.values():
        assert (each["text"], each["output_ids"]) == ("0,1,", [10, 11])
        reason = each["meta_info"]["finish_reason"]
        assert reason == {"type": "abort", "message": "The request was aborted.", "status_code": None, "err_type": None}
        assert len(each["meta_info"]["output_token_logprobs"]) == each["meta_info"]["completion_tokens"] == 2
    assert len(found) == 2
    assert [abort.rid for abort in engine.aborts()] == [engine.requests()[0].rid]
    assert engine.running == []
    assert served.manager.counters.outcomes == {"refused": 1}


async def test_finished_choices_and_other_requests_are_kept(engine_of: EngineOf, http_of: HttpOf) -> None:
    def script(_request: TokenizedGenerateReqInput, index: int) -> list[Token]:
        return [Token(10, "done", FinishReason(FinishType.STOP, 10))] if index == 0 else endless(_request, index)

    engine = engine_of(script, auto=False)
    async with serving(engine) as served:
        http = http_of(served)
        asked = asyncio.create_task(http.post("/generate", json={"text": "hello", "sampling_params": {"n": 2}}))
        await until_dispatched(engine, 1)
        engine.step()
        await http.post("/abort_request", json={"rid": engine.requests()[0].rid})
        answer = (await asked).json()
    assert [(each["text"], each["meta_info"]["finish_reason"]["type"]) for each in answer] == [
        ("done", "stop"),
        ("0,", "abort"),
    ]


async def test_an_abort_at_another_frontend_gives_the_output_too(engine_of: EngineOf, http_of: HttpOf) -> None:
    engine = engine_of(endless, auto=False)
    async with serving(engine) as served:
        asked = asyncio.create_task(http_of(served).post("/generate", json={"text": "hello"}))
        await until_dispatched(engine, 1)
        engine.step()
        engine.end_as_asked(engine.requests()[0].rid)
        answer = await asked
    assert answer.status_code == 200
    assert (answer.json()["text"], answer.json()["meta_info"]["finish_reason"]["type"]) == ("0,", "abort")


async def test_a_request_without_output_can_be_aborted(engine_of: EngineOf, http_of: HttpOf) -> None:
    engine = engine_of(endless, auto=False)
    async with serving(engine) as served:
        http = http_of(served)
        asked = asyncio.create_task(http.post("/generate", json={"text": "hello", "stream": True}))
        await until_dispatched(engine, 1)
        await http.post("/abort_request", json={"rid": engine.requests()[0].rid})
        [event] = events_of(await asked)
    assert (event["text"], event["output_ids"], event["meta_info"]["finish_reason"]["type"]) == ("", [], "abort")


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/generate", {"text": ["hello", "fox " * 200]}, "text[1]"),
        ("/generate", {"input_ids": [[5], [5] * 200]}, "input_ids[1]"),
        ("/generate", {"input_ids": [[5], [99999]]}, "input_ids[1]"),
        ("/v1/completions", {"model": "tiny", "prompt": ["hello", "fox " * 200]}, "prompt[1]"),
        ("/v1/completions", {"model": "tiny", "prompt": [[5], [99999]]}, "prompt[1]"),
    ],
)
async def test_the_prompt_at_fault_is_named(
    engine_of: EngineOf, http_of: HttpOf, path: str, body: dict[str, Any], param: str
) -> None:
    async with serving(engine_of()) as served:
        answer = await http_of(served).post(path, json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
