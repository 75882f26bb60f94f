"""vLLM's `prompt_logprobs`, for a chat and for each choice of completions."""

import math
from collections.abc import Callable
from typing import Any

import httpx2
import openai
import pytest
from tokenizers import Tokenizer

from tercet.frontend.api.openai.logprobs import prompt_logprobs
from tercet.frontend.model.token_bytes import TokenBytes
from tercet.frontend.model.tokenizer import PromptTokenizer
from tercet.frontend.testing import FakeEngine, Served, serving
from tercet.protocol.messages.messages import TokenizedGenerateReqInput
from tercet.protocol.messages.values import LogprobParams, Logprobs, pack_floats, pack_ints, unpack_ints

EngineOf = Callable[..., FakeEngine]
OpenAIOf = Callable[..., openai.AsyncOpenAI]
HttpOf = Callable[[Served], httpx2.AsyncClient]

CHAT: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}]}


STREAMED: dict[str, Any] = {"prompt_logprobs": 0, "stream": True}


def of_the_engine(request: TokenizedGenerateReqInput) -> list[dict[str, float] | None]:
    """Return the scores of the test engine: -1, -2, ... from the second prompt token on."""
    assert request.logprobs is not None
    other = {"0": -20.0} if request.logprobs.top > 1 else {}
    ids = list(unpack_ints(request.input_ids))
    return [None, *({str(token_id): -1.0 - place, **other} for place, token_id in enumerate(ids[1:]))]


def values(told: list[dict[str, dict[str, Any]] | None]) -> list[dict[str, float] | None]:
    return [None if each is None else {token_id: entry["logprob"] for token_id, entry in each.items()} for each in told]


def test_each_token_comes_first_and_has_a_rank_among_the_likeliest(tokenizer: Tokenizer) -> None:
    names = TokenBytes(PromptTokenizer(tokenizer.to_str()))
    the, quick = (tokenizer.encode(word).ids[0] for word in ("the", " quick"))
    scores = Logprobs(
        pack_floats([math.nan, -2.0, -math.inf]),
        2,
        pack_ints([the, quick, quick, the, 10, quick]),
        pack_floats([math.nan, math.nan, -0.5, -2.0, -0.25, -1.5]),
    )
    first = {"logprob": -0.5, "rank": 1, "decoded_token": " quick"}
    second = {"logprob": -2.0, "rank": 2, "decoded_token": "the"}
    unlikely = {"logprob": -9999.0, "rank": None, "decoded_token": "the"}
    likelier = {
        "10": {"logprob": -0.25, "rank": 1, "decoded_token": tokenizer.decode([10])},
        str(quick): {"logprob": -1.5, "rank": 2, "decoded_token": " quick"},
    }
    told = prompt_logprobs(names, [quick, the, the], scores, top=2)
    assert told == [None, {str(the): second, str(quick): first}, {str(the): unlikely, **likelier}]
    assert told is not None
    assert told[1] is not None
    assert list(told[1]) == [str(the), str(quick)]
    assert prompt_logprobs(names, [quick, the, the], scores, top=0) == [None, {str(the): second}, {str(the): unlikely}]


@pytest.mark.parametrize("logprobs", [{}, {"logprobs": True, "top_logprobs": 1}])
async def test_a_chat_has_them_beside_its_choices(
    engine_of: EngineOf, openai_of: OpenAIOf, logprobs: dict[str, Any]
) -> None:
    async with serving(engine_of()) as served:
        asked = {**CHAT, **logprobs, "n": 2}
        scored = await openai_of(served).chat.completions.create(**asked, extra_body={"prompt_logprobs": 3})
        plain = await openai_of(served).chat.completions.create(**asked)
        [request, unscored] = served.engine.requests()
    assert scored.model_extra is not None
    assert values(scored.model_extra["prompt_logprobs"]) == of_the_engine(request)
    assert plain.model_extra == {}
    assert [choice.logprobs for choice in scored.choices] == [choice.logprobs for choice in plain.choices]
    assert request.logprobs == LogprobParams(top=3, prompt=True)
    assert unscored.logprobs == (LogprobParams(top=1) if logprobs else None)


async def test_completions_have_them_in_each_choice(engine_of: EngineOf, openai_of: OpenAIOf) -> None:
    async with serving(engine_of()) as served:
        answer = await openai_of(served).completions.create(
            model="tiny", prompt=["the quick", "brown fox"], n=2, best_of=3, extra_body={"prompt_logprobs": 0}
        )
        first, second = map(of_the_engine, served.engine.requests())
    told = [choice.model_extra["prompt_logprobs"] for choice in answer.choices if choice.model_extra is not None]
    assert list(map(values, told)) == [first, first, second, second]
    assert {choice.logprobs for choice in answer.choices} == {None}


async def test_output_and_echo_show_as_many_alternatives_as_were_asked_for_them(
    engine_of: EngineOf, http_of: HttpOf
) -> None:
    body = {"model": "tiny", "prompt": "the quick", "echo": True, "logprobs": 1, "max_tokens": 1}
    async with serving(engine_of()) as served:
        http = http_of(served)
        plain, scored, silent = [
            (await http.post("/v1/completions", json={**body, **more})).json()["choices"][0]
            for more in ({}, {"prompt_logprobs": 20}, {"prompt_logprobs": 20, "logprobs": None})
        ]
    assert scored["logprobs"] == plain["logprobs"]
    assert scored["prompt_logprobs"] == silent["prompt_logprobs"]
    assert silent["logprobs"] is None
    assert silent["text"] == plain["text"]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
@pytest.mark.parametrize(
    "asked",
    [
        {"prompt_logprobs": -1},
        {"prompt_logprobs": 21},
        {"prompt_logprobs": True},
        {"prompt_logprobs": 0, "stream": True},
    ],
)
async def test_others_are_refused(engine_of: EngineOf, http_of: HttpOf, path: str, asked: dict[str, Any]) -> None:
    body = CHAT if "chat" in path else {"model": "tiny", "prompt": "hello"}
    async with serving(engine_of()) as served:
        answer = await http_of(served).post(path, json={**body, **asked})
        assert served.engine.requests() == []
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "prompt_logprobs")
