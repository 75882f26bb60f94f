"""/v1/completions through OpenAI's client, which validates strictly. Names state the rule.

Its types do not allow a null finish_reason of a chunk, or a null first log-probability of an echo, although OpenAI's
server sends them. Validation is relaxed there.
"""

import json
from collections.abc import Callable
from typing import Any

import httpx2
import msgspec
import openai
import pytest
from openai.types import CompletionCreateParams
from openai.types.completion_create_params import CompletionCreateParamsBase
from tokenizers import Tokenizer, processors

from tercet.frontend.api.openai import completions
from tercet.frontend.api.openai.completion_schema import CompletionRequest
from tercet.frontend.api.openai.logprobs import Members, echo_logprobs
from tercet.frontend.http.loop_turns import Steps
from tercet.frontend.testing import FakeEngine, Served, Token, decode_spec, serving
from tercet.protocol.messages.messages import TokenizedGenerateReqInput
from tercet.protocol.messages.values import ModelLimits, unpack_ints

EngineOf = Callable[..., FakeEngine]
OpenAIOf = Callable[..., openai.AsyncOpenAI]
HttpOf = Callable[[Served], httpx2.AsyncClient]

BODY: dict[str, Any] = {"model": "tiny", "prompt": "hello"}


def numbered(request: TokenizedGenerateReqInput, index: int) -> list[Token]:
    """Return tokens that state the length of the prompt and the index of the choice."""
    return [
        Token(40, f"{len(unpack_ints(request.input_ids))}"),
        Token(41, f".{index}", logprob=-0.25, top=((5, -1.0),)),
    ]


async def test_a_prompt_is_completed(engine_of: EngineOf, openai_of: OpenAIOf) -> None:
    async with serving(engine_of()) as served:
        answer = await openai_of(served).completions.create(**BODY)
        [request] = served.engine.requests()
    [choice] = answer.choices
    assert (choice.text, choice.finish_reason, choice.logprobs) == ("Hello world!", "stop", None)
    assert (answer.object, answer.id[:5]) == ("text_completion", "cmpl-")
    assert request.sampling.max_new_tokens == 16


async def test_rule_1_a_prompt_is_completed_in_a_stream(engine_of: EngineOf, openai_of: OpenAIOf) -> None:
    async with serving(engine_of()) as served:
        stream = await openai_of(served, strict=False).completions.create(
            **BODY, stream=True, stream_options={"include_usage": True}
        )
        *chunks, last = [chunk async for chunk in stream]
    assert "".join(chunk.choices[0].text for chunk in chunks) == "Hello world!"
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices[0].finish_reason] == ["stop"]
    assert last.choices == []
    assert last.usage is not None
    assert last.usage.completion_tokens == 4


async def test_rules_1_3_and_5_chunks_agree_and_the_last_event_says_so(engine_of: EngineOf, http_of: HttpOf) -> None:
    body = {**BODY, "n": 2, "stream": True}
    async with serving(engine_of()) as served:
        counted = await http_of(served).post(
            "/v1/completions", json={**body, "stream_options": {"include_usage": True}}
        )
        plain = await http_of(served).post("/v1/completions", json=body)
    for answer in (counted, plain):
        assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
        assert answer.text.endswith("\n\ndata: [DONE]\n\n")
    *chunks, last = [json.loads(line[6:]) for line in counted.text.splitlines() if line.startswith("data: {")]
    assert {(chunk["id"], chunk["created"], chunk["model"]) for chunk in chunks} == {
        (last["id"], last["created"], "tiny")
    }
    assert all(chunk["usage"] is None for chunk in chunks)
    assert (last["choices"], last["usage"]["completion_tokens"]) == ([], 8)
    for index in range(2):
        reasons = [chunk["choices"][0]["finish_reason"] for chunk in chunks if chunk["choices"][0]["index"] == index]
        assert reasons == [None, None, None, "stop"]
    assert all("usage" not in json.loads(line[6:]) for line in plain.text.splitlines() if line.startswith("data: {"))


@pytest.mark.parametrize(
    ("prompt", "lengths"),
    [
        ("the quick", [2]),
        (["the quick", "the"], [2, 1]),
        ([7, 8, 9], [3]),
        ([[7, 8, 9], [7]], [3, 1]),
    ],
)
async def test_rule_6_every_prompt_has_its_choices_in_order(
    engine_of: EngineOf, openai_of: OpenAIOf, prompt: Any, lengths: list[int]
) -> None:
    expected = [f"{length}.{index}" for length in lengths for index in range(2)]
    async with serving(engine_of(numbered)) as served:
        answer = await openai_of(served).completions.create(model="tiny", prompt=prompt, n=2)
        stream = await openai_of(served, strict=False).completions.create(model="tiny", prompt=prompt, n=2, stream=True)
        chunks = [chunk async for chunk in stream]
    assert [choice.index for choice in answer.choices] == list(range(2 * len(lengths)))
    assert [choice.text for choice in answer.choices] == expected
    streamed = dict.fromkeys(range(2 * len(lengths)), "")
    for chunk in chunks:
        streamed[chunk.choices[0].index] += chunk.choices[0].text
    assert list(streamed.values()) == expected
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (sum(lengths), 4 * len(lengths))


async def test_rule_7_log_probabilities_of_the_output(engine_of: EngineOf, openai_of: OpenAIOf) -> None:
    async with serving(engine_of(numbered)) as served:
        answer = await openai_of(served).completions.create(**BODY, logprobs=1)
        chosen_only = await openai_of(served).completions.create(**BODY, logprobs=0)
    scores = answer.choices[0].logprobs
    assert scores is not None
    assert scores.tokens is not None
    assert scores.top_logprobs is not None
    assert scores.token_logprobs == [-0.5, -0.25]
    assert scores.text_offset == [0, len(scores.tokens[0])]
    assert scores.top_logprobs[0] == {scores.tokens[0]: -0.5}
    assert sorted(scores.top_logprobs[1].values()) == [-1.0, -0.25]
    alone = chosen_only.choices[0].logprobs
    assert alone is not None
    assert alone.top_logprobs == [{scores.tokens[0]: -0.5}, {scores.tokens[1]: -0.25}]


async def test_rule_7_the_prompt_is_scored_without_generating(
    engine_of: EngineOf, openai_of: OpenAIOf, tokenizer: Tokenizer
) -> None:
    prompt = "the quick brown"
    ids = tokenizer.encode(prompt).ids
    async with serving(engine_of(numbered)) as served:
        answer = await openai_of(served, strict=False).completions.create(
            model="tiny", prompt=prompt, max_tokens=0, echo=True, logprobs=1
        )
        [request] = served.engine.requests()
    assert request.logprobs is not None
    assert request.logprobs.prompt
    [choice] = answer.choices
    assert (choice.text, choice.finish_reason) == (prompt, "length")
    assert choice.logprobs is not None
    assert choice.logprobs.tokens == [tokenizer.decode([each]) for each in ids]
    assert choice.logprobs.token_logprobs == [None, *(-1.0 - place for place in range(len(ids) - 1))]
    assert choice.logprobs.text_offset == [0, 3, 9]
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 0


def beginning_with_bos(files: dict[str, bytes]) -> dict[str, bytes]:
    """Return the files of a model whose texts all begin with a special token."""
    tokenizer = Tokenizer.from_str(files["tokenizer.json"].decode())
    begin = ("<s>", tokenizer.token_to_id("<s>"))
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[begin])
    return {**files, "tokenizer.json": tokenizer.to_str().encode()}


async def test_rule_7_echo_has_logprobs_and_text_offsets_for_each_token(
    engine_of: EngineOf, http_of: HttpOf, files: dict[str, bytes], tokenizer: Tokenizer
) -> None:
    body = {"model": "tiny", "prompt": "the quick brown", "echo": True, "logprobs": 1, "max_tokens": 2}
    said = [Token(each, tokenizer.decode([each])) for each in tokenizer.encode(" fox jumps").ids[:2]]
    async with serving(engine_of(lambda _request, _index: said, files=beginning_with_bos(files))) as served:
        http = http_of(served)
        whole = (await http.post("/v1/completions", json=body)).json()["choices"][0]
        streamed = await http.post("/v1/completions", json={**body, "stream": True})
    scores = whole["logprobs"]
    assert scores["tokens"][0] == "<s>"
    assert scores["text_offset"][0] == 0
    for token, offset in zip(scores["tokens"][1:], scores["text_offset"][1:], strict=True):
        assert whole["text"].startswith(token, offset)
    assert len(scores["tokens"]) == len(scores["token_logprobs"]) == len(scores["top_logprobs"])
    assert (scores["token_logprobs"][0], scores["top_logprobs"][0]) == (None, None)
    assert scores["top_logprobs"][1] == {scores["tokens"][1]: -1.0}
    chunks = [json.loads(line[6:])["choices"][0] for line in streamed.text.splitlines() if line.startswith("data: {")]
    assert "".join(chunk["text"] for chunk in chunks) == whole["text"]
    for field, values in scores.items():
        assert [value for chunk in chunks for value in chunk["logprobs"][field]] == values


@pytest.mark.parametrize("prompt", ["the quick", [7, 8, 9]])
async def test_rule_7_echo_puts_the_prompt_before_the_text(
    engine_of: EngineOf, openai_of: OpenAIOf, tokenizer: Tokenizer, prompt: Any
) -> None:
    text = prompt if isinstance(prompt, str) else tokenizer.decode(prompt)
    async with serving(engine_of()) as served:
        answer = await openai_of(served, strict=False).completions.create(
            model="tiny", prompt=prompt, echo=True, n=2, logprobs=0, max_tokens=2
        )
        stream = await openai_of(served, strict=False).completions.create(
            model="tiny", prompt=prompt, echo=True, stream=True
        )
        chunks = [chunk async for chunk in stream]
    assert [choice.text for choice in answer.choices] == [f"{text}Hello wor"] * 2
    for choice in answer.choices:
        assert choice.logprobs is not None
        assert choice.logprobs.token_logprobs is not None
        assert choice.logprobs.token_logprobs[0] is None
        assert choice.logprobs.token_logprobs[-2:] == [-0.5, -0.5]
    assert "".join(chunk.choices[0].text for chunk in chunks) == f"{text}Hello world!"


async def test_an_echo_leaves_out_what_no_token_spells(
    engine_of: EngineOf, openai_of: OpenAIOf, limits: ModelLimits
) -> None:
    padded = msgspec.structs.replace(limits, vocab_size=limits.vocab_size + 8)
    async with serving(engine_of(limits=padded)) as served:
        answer = await openai_of(served, strict=False).completions.create(
            model="tiny", prompt=[ord("a"), limits.vocab_size, limits.vocab_size + 7], echo=True, logprobs=0
        )
    [choice] = answer.choices
    assert choice.text.endswith("Hello world!")
    assert choice.logprobs is not None
    assert choice.logprobs.tokens is not None
    assert choice.logprobs.tokens[1:3] == ["", ""]


@pytest.mark.parametrize("stream", [False, True])
async def test_an_echo_is_scored_once_for_all_choices(
    engine_of: EngineOf, http_of: HttpOf, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    scored: list[str] = []

    def watched(*given: Any) -> Steps[dict[str, Members]]:
        scored.append(given[3])
        return echo_logprobs(*given)

    monkeypatch.setattr(completions, "echo_logprobs", watched)
    prompts = ["the quick", "brown fox"]
    async with serving(engine_of()) as served:
        body = {"model": "tiny", "prompt": prompts, "n": 4, "echo": True, "logprobs": 1, "stream": stream}
        answer = await http_of(served).post("/v1/completions", json=body)
    assert answer.text.count('"the"') == 4
    assert sorted(scored) == sorted(prompts)


async def test_an_editor_that_completes_code_has_many_stops(engine_of: EngineOf, http_of: HttpOf) -> None:
    words = ["fim_prefix", "fim_suffix", "fim_middle", "fim_pad", "repo_name", "file_sep", "im_start", "im_end"]
    stops = [*(f"<|{word}|>" for word in words), "/src/", "#- coding: utf-8", "```", "\ndef", "\nclass", '\n"#']
    asked = {**BODY, "max_tokens": 2, "temperature": 0.01, "stream": True, "stop": stops}
    async with serving(engine_of()) as served:
        answer = await http_of(served).post("/v1/completions", json=asked)
        [request] = served.engine.requests()
    assert answer.status_code == 200, answer.text
    assert decode_spec(request).stop == stops


async def test_rule_8_more_than_the_context_is_refused(engine_of: EngineOf, openai_of: OpenAIOf) -> None:
    async with serving(engine_of()) as served:
        with pytest.raises(openai.BadRequestError) as error:
            await openai_of(served).completions.create(**BODY, max_tokens=128)
        await openai_of(served).completions.create(model="tiny", prompt=[5] * 100, max_tokens=28)
    assert (error.value.code, error.value.param) == ("context_length_exceeded", "max_tokens")


async def test_of_several_prompts_none_runs_when_one_is_refused(engine_of: EngineOf, openai_of: OpenAIOf) -> None:
    async with serving(engine_of()) as served:
        with pytest.raises(openai.BadRequestError):
            await openai_of(served).completions.create(model="tiny", prompt=["fine", "too long " * 100])
        assert served.engine.requests() == []
        assert served.manager.running == 0


async def test_rule_17_every_documented_parameter_is_known() -> None:
    assert {*CompletionCreateParamsBase.__annotations__, "stream"} <= CompletionRequest.model_fields.keys()
    assert CompletionCreateParams is not None


@pytest.mark.parametrize("asked", [{"best_of": 1}, {"best_of": 2, "n": 2}, {"suffix": ""}, {"user": "me"}])
async def test_rule_17_parameters_that_ask_for_nothing_more_are_accepted(
    engine_of: EngineOf, openai_of: OpenAIOf, asked: dict[str, Any]
) -> None:
    async with serving(engine_of()) as served:
        answer = await openai_of(served).completions.create(**BODY, **asked)
    assert answer.choices[0].text == "Hello world!"


@pytest.mark.parametrize(
    ("asked", "param"),
    [
        ({"best_of": 1, "n": 2}, "best_of"),
        ({"best_of": 2, "stream": True}, "best_of"),
        ({"best_of": 21}, "best_of"),
        ({"prompt": ["x"] * 200, "best_of": 11}, "best_of"),
        ({"suffix": "end"}, "suffix"),
        ({"logprobs": 6}, "logprobs"),
        ({"logprobs": True}, "logprobs"),
        ({"prompt": []}, "prompt"),
        ({"prompt": None}, "prompt"),
        ({"prompt": [[]]}, "prompt[0]"),
        ({"prompt": [5, "x"]}, "prompt[1]"),
        ({"prompt": [99999]}, "prompt"),
        ({"prompt": [-1]}, "prompt[0]"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": ["x"] * 100, "n": 100}, "n"),
        ({"messages": []}, "messages"),
    ],
)
async def test_rule_15_other_parameters_are_refused_by_name(
    engine_of: EngineOf, http_of: HttpOf, asked: dict[str, Any], param: str
) -> None:
    async with serving(engine_of()) as served:
        answer = await http_of(served).post("/v1/completions", json={**BODY, **asked})
        assert served.engine.requests() == []
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param


def rivals(request: TokenizedGenerateReqInput, index: int) -> list[Token]:
    """Return scores for which the third choice has the best mean, though not the best sum; then the first."""
    logprobs = [[-0.5, -0.5], [-2.0], [-0.4, -0.4, -0.4], [-1.0, -0.9]][index]
    return [Token(40 + index, f"{index}", logprob=logprob) for logprob in logprobs]


async def test_rule_17_the_best_of_several_are_returned(engine_of: EngineOf, openai_of: OpenAIOf) -> None:
    async with serving(engine_of(rivals)) as served:
        client = openai_of(served)
        answer = await client.completions.create(model="tiny", prompt=["a", "b"], n=2, best_of=4)
        scored = await openai_of(served, strict=False).completions.create(**BODY, best_of=4, logprobs=1)
        first = served.engine.requests()[0]
    assert [(choice.index, choice.text) for choice in answer.choices] == [(0, "222"), (1, "00"), (2, "222"), (3, "00")]
    assert {choice.logprobs for choice in answer.choices} == {None}
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 2 * (2 + 1 + 3 + 2)
    assert first.sampling.n == 4
    [best] = scored.choices
    assert best.logprobs is not None
    assert best.logprobs.token_logprobs == pytest.approx([-0.4] * 3)


async def test_min_tokens_bind_scheduler_and_detokenizer(engine_of: EngineOf, http_of: HttpOf) -> None:
    async with serving(engine_of()) as served:
        await http_of(served).post("/v1/completions", json={**BODY, "min_tokens": 3, "stop": "o"})
        [request] = served.engine.requests()
    assert request.sampling.min_new_tokens == 3
    assert decode_spec(request).min_tokens == 3


async def test_special_tokens_in_a_prompt_are_special(
    engine_of: EngineOf, openai_of: OpenAIOf, tokenizer: Tokenizer
) -> None:
    async with serving(engine_of()) as served:
        await openai_of(served).completions.create(model="tiny", prompt="<|im_start|>user")
        [request] = served.engine.requests()
    assert list(unpack_ints(request.input_ids)) == tokenizer.encode("<|im_start|>user").ids
