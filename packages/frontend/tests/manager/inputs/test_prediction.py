"""Predictions are sent to the scheduler, and usage reports the accepted tokens."""

import random
from collections.abc import Callable, Sequence
from typing import Any

import httpx2
import openai
import pytest

from tercet.frontend.manager.inputs.prediction import MAX_PREDICTION_TOKENS, predicted_tokens
from tercet.frontend.testing import FakeEngine, Served, Token, serving
from tercet.protocol.messages.messages import TokenizedGenerateReqInput
from tercet.protocol.messages.values import FinishReason, FinishType, unpack_ints

EngineOf = Callable[..., FakeEngine]
OpenAIOf = Callable[..., openai.AsyncOpenAI]
HttpOf = Callable[[Served], httpx2.AsyncClient]
TEXT = "The scheduler plans and the executor computes"


def all_but_last_token(request: TokenizedGenerateReqInput, index: int) -> Sequence[Token]:
    """Predict the first answer without its last token; the second choice shares nothing with it."""
    predicted = list(unpack_ints(request.prediction))[:-1] if index == 0 else [1, 1]
    end = FinishReason(FinishType.STOP)
    return [Token(token, "x", end if place == len(predicted) - 1 else None) for place, token in enumerate(predicted)]


BODY: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}]}


@pytest.mark.parametrize(
    ("prediction", "output", "count"),
    [
        ([1, 2, 3, 4], [1, 2, 3, 4], 4),
        ([1, 2, 3, 4], [1, 2, 3, 4, 5], 4),
        ([1, 2, 3, 4], [1, 2], 2),
        ([1, 2, 3, 4, 5, 6], [1, 9, 3, 4, 5, 6], 5),  # one substitution
        ([1, 2, 3, 4, 5, 6], [1, 8, 9, 2, 3, 4, 5, 6], 6),  # two insertions
        ([1, 2, 3, 4, 5, 6], [1, 4, 5, 6], 4),  # two deletions
        ([1, 2, 3], [4, 5, 6], 0),
        ([1, 2, 3, 4, 5, 6], [4, 5, 6, 1, 2, 3], 3),  # reordered
        ([1, 2], [], 0),
        ([], [1, 2], 0),
    ],
)
def test_predicted_tokens(prediction: list[int], output: list[int], count: int) -> None:
    assert predicted_tokens(prediction, output) == count


@pytest.mark.parametrize("seed", range(10))
def test_no_more_is_counted_than_is_in_both_in_order(seed: int) -> None:
    chance = random.Random(seed)
    prediction, output = ([chance.randrange(4) for _ in range(chance.randrange(60))] for _ in range(2))
    longest = [0] * (len(output) + 1)  # longest common subsequence, by length of the output's prefix
    for token in prediction:
        before = list(longest)
        for place, other in enumerate(output):
            longest[place + 1] = before[place] + 1 if token == other else max(before[place + 1], longest[place])
    assert predicted_tokens(prediction, output) <= longest[-1]


@pytest.mark.parametrize("content", [TEXT, [{"type": "text", "text": TEXT[:9]}, {"type": "text", "text": TEXT[9:]}]])
async def test_a_prediction_is_sent_and_counted(engine_of: EngineOf, openai_of: OpenAIOf, content: Any) -> None:
    async with serving(engine_of(all_but_last_token)) as served:
        prediction: Any = {"type": "content", "content": content}
        answer = await openai_of(served).chat.completions.create(**BODY, prediction=prediction)
        tokenized = served.manager.models.get("tiny").tokenizer.encode(TEXT, add_special_tokens=False)
        [request] = served.engine.requests()
    assert list(unpack_ints(request.prediction)) == tokenized
    assert answer.usage is not None
    details = answer.usage.completion_tokens_details
    assert details is not None
    predicted = details.accepted_prediction_tokens, details.rejected_prediction_tokens
    assert predicted == (len(tokenized) - 1, 1)
    assert answer.usage.completion_tokens == len(tokenized) - 1


async def test_each_choice_is_counted_and_a_stream_tells_at_its_end(engine_of: EngineOf, openai_of: OpenAIOf) -> None:
    options: Any = {"include_usage": True, "continuous_usage_stats": True}
    async with serving(engine_of(all_but_last_token)) as served:
        stream = await openai_of(served).chat.completions.create(
            **BODY,
            n=2,
            stream=True,
            stream_options=options,
            prediction={"type": "content", "content": TEXT},
        )
        usages = [chunk.usage async for chunk in stream if chunk.usage is not None]
        predicted = len(served.manager.models.get("tiny").tokenizer.encode(TEXT, add_special_tokens=False))
    details = [usage.completion_tokens_details for usage in usages]
    assert all(each is not None and each.accepted_prediction_tokens is None for each in details[:-1])
    assert details[-1] is not None
    reported = details[-1].accepted_prediction_tokens, details[-1].rejected_prediction_tokens
    assert reported == (predicted - 1, predicted + 1)


async def test_without_one_there_is_nothing_to_count(engine_of: EngineOf, http_of: HttpOf) -> None:
    async with serving(engine_of()) as served:
        for more in ({}, {"prediction": None}, {"prediction": {"type": "content", "content": ""}}):
            answer = await http_of(served).post("/v1/chat/completions", json={**BODY, **more})
            assert answer.json()["usage"]["completion_tokens_details"] == {"reasoning_tokens": 0}
        assert {request.prediction for request in served.engine.requests()} == {b""}


async def test_of_a_long_prediction_the_beginning_is_looked_at(engine_of: EngineOf, http_of: HttpOf) -> None:
    async with serving(engine_of()) as served:
        text = "Hello world " * MAX_PREDICTION_TOKENS
        body = {**BODY, "prediction": {"type": "content", "content": text}}
        answer = await http_of(served).post("/v1/chat/completions", json=body)
        assert answer.status_code == 200
        [request] = served.engine.requests()
        assert len(unpack_ints(request.prediction)) == MAX_PREDICTION_TOKENS


@pytest.mark.parametrize(
    ("prediction", "param"),
    [
        ("Hello", "prediction"),
        ({"type": "content"}, "prediction.content"),
        ({"type": "other", "content": "x"}, "prediction.type"),
        ({"type": "content", "content": "x", "more": 1}, "prediction.more"),
        ({"type": "content", "content": [{"type": "image_url", "image_url": {}}]}, "prediction.content[0]"),
    ],
)
async def test_what_is_no_prediction_is_refused(
    engine_of: EngineOf, http_of: HttpOf, prediction: Any, param: str
) -> None:
    async with serving(engine_of()) as served:
        answer = await http_of(served).post("/v1/chat/completions", json={**BODY, "prediction": prediction})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"].startswith(param)
