"""Images in chat messages reach schedulers as arrays, in their places among the tokens."""

import hashlib
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx2
import msgspec
import openai
import pytest
from tokenizers import Tokenizer

pytest.importorskip("PIL")

from packages.frontend.tests.media.image_files import data_url, noise, saved
from packages.frontend.tests.media.resending import sent_twice
from packages.frontend.tests.media.seeing import image, seeing, text, user
from tercet.frontend.testing import FakeEngine, Served, serving
from tercet.protocol.messages.values import ModelLimits, unpack_ints

OpenAIOf = Callable[..., openai.AsyncOpenAI]
HttpOf = Callable[[Served], httpx2.AsyncClient]
CAT, DOG = (data_url(saved(noise(20, 30, seed=seed))) for seed in (1, 2))


@pytest.fixture
def engine(
    engine_of: Callable[..., FakeEngine], files: dict[str, bytes], limits: ModelLimits, tokenizer: Tokenizer
) -> FakeEngine:
    return seeing(engine_of, files, limits, tokenizer)


@pytest.fixture
async def served(engine: FakeEngine) -> AsyncIterator[Served]:
    async with serving(engine) as running:
        yield running


async def test_images_travel_with_their_places(
    served: Served, engine: FakeEngine, openai_of: OpenAIOf, tokenizer: Tokenizer
) -> None:
    messages: Any = [
        {"role": "system", "content": "Look."},
        user(text("a </s> <|endoftext|> "), image(CAT), text("and"), image(DOG)),
        {"role": "assistant", "content": "Both."},
        user(image(CAT)),
    ]
    client = openai_of(served)
    answer = await client.chat.completions.create(model="tiny", messages=messages, max_tokens=9)
    assert answer.choices[0].message.content == "Hello world!"
    [request], [frames] = engine.requests(), engine.frames
    ids = list(unpack_ints(request.input_ids))
    assert engine.limits.images is not None
    placeholder = engine.limits.images.token_id
    assert ids.count(placeholder) == 9, "what the client writes stays text"
    assert [ids[each.first - 1 : each.first + 4] for each in request.images] == [
        [tokenizer.token_to_id("<s>"), *[placeholder] * 3, tokenizer.encode("\n").ids[0]]
    ] * 3
    hashes = [hashlib.sha256(b"2 6 0 0 " + frame).digest() for frame in frames]
    assert [each.sha256 for each in request.images] == hashes
    assert [bytes(frame) for frame in frames] == [
        noise(20, 30, seed=seed).resize((6, 2), 2).tobytes() for seed in (1, 2, 1)
    ]
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(ids)
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.image_tokens == 9
    counted = await client.post("/../tokenize", body={"model": "tiny", "messages": messages}, cast_to=object)
    assert isinstance(counted, dict)
    assert counted["count"] == len(ids)


async def test_a_request_is_sent_again_with_its_images(served: Served, engine: FakeEngine, http_of: HttpOf) -> None:
    body = {"model": "tiny", "messages": [user(image(CAT))], "max_tokens": 4}
    first, again = await sent_twice(engine, http_of(served).post("/v1/chat/completions", json=body))
    assert again.images == first.images


async def test_schedulers_that_take_no_images_get_none(served: Served, engine: FakeEngine, http_of: HttpOf) -> None:
    engine.limits = msgspec.structs.replace(engine.limits, images=None)
    engine.scheduler_up("scheduler-1")
    for _ in range(4):
        body = {"model": "tiny", "messages": [user(image(CAT))], "max_tokens": 4}
        assert (await http_of(served).post("/v1/chat/completions", json=body)).status_code == 200
    assert {peer for peer, message in engine.sent if message in engine.requests()} == {"scheduler-0"}


CALL = {"id": "call00001", "type": "function", "function": {"name": "look", "arguments": "{}"}}


async def test_a_result_of_a_tool_may_be_an_image(served: Served, engine: FakeEngine, http_of: HttpOf) -> None:
    messages = [
        user(text("look")),
        {"role": "assistant", "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "call00001", "content": [image(CAT)]},
    ]
    answer = await http_of(served).post("/v1/chat/completions", json={"model": "tiny", "messages": messages})
    assert answer.status_code == 200, answer.text
    assert [len(request.images) for request in engine.requests()] == [1]


async def test_messages_of_anthropic_have_images(served: Served, engine: FakeEngine, http_of: HttpOf) -> None:
    cat = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": CAT.partition(",")[2]}}
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "see"}, cat, {"type": "text", "text": "and look"}]},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "toolu_1", "name": "look", "input": {}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "toolu_1", "content": [cat]}]},
    ]
    body = {"model": "tiny", "messages": messages, "max_tokens": 9}
    answer = await http_of(served).post("/v1/messages", json=body)
    assert answer.status_code == 200, answer.text
    [request] = engine.requests()
    assert len(request.images) == 2
    body["messages"] = [
        {"role": "user", "content": [{"type": "image", "source": {"type": "url", "url": "http://a/b"}}]}
    ]
    refused = await http_of(served).post("/v1/messages", json=body)
    assert refused.status_code == 400
    assert "messages.0.content.0: Images are read from 'data:' URLs only" in refused.json()["error"]["message"]


async def test_transformations_of_anthropic_are_the_default_or_refused(served: Served, http_of: HttpOf) -> None:
    source = {"type": "base64", "media_type": "image/png", "data": CAT.partition(",")[2]}
    given = {}
    for choice in ("downsize", "error"):
        cat = {"type": "image", "source": source, "transformations": {"oversized_image": choice}}
        body = {"model": "tiny", "messages": [{"role": "user", "content": [cat]}], "max_tokens": 9}
        given[choice] = await http_of(served).post("/v1/messages", json=body)
    assert [each.status_code for each in given.values()] == [200, 400]
    assert "messages.0.content.0.transformations" in given["error"].json()["error"]["message"]


REFUSED = {
    "no image": (data_url(b"no image"), "none of PNG, JPEG, GIF, WEBP"),
    "a file of the server": ("file:///etc/passwd", "'data:' URLs only"),
    "an address": ("http://169.254.169.254/latest/meta-data", "'data:' URLs only"),
}


@pytest.mark.parametrize("name", REFUSED)
async def test_a_bad_image_is_named(served: Served, engine: FakeEngine, http_of: HttpOf, name: str) -> None:
    url, why = REFUSED[name]
    body = {"model": "tiny", "messages": [user(text("see"), image(url))]}
    answer = await http_of(served).post("/v1/chat/completions", json=body)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, "messages[0].content[1]")
    assert why in error["message"]
    assert engine.requests() == []


async def test_more_images_than_possible_are_refused(served: Served, http_of: HttpOf) -> None:
    body = {"model": "tiny", "messages": [user(*[image(CAT)] * 33)]}
    answer = await http_of(served).post("/v1/chat/completions", json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "messages")


async def test_a_model_that_sees_nothing_says_so(engine_of: Callable[..., FakeEngine], http_of: HttpOf) -> None:
    async with serving(engine_of()) as served:
        body = {"model": "tiny", "messages": [user(text("see"), image(CAT))]}
        answer = await http_of(served).post("/v1/chat/completions", json=body)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (400, "unsupported_parameter")
    assert error["param"] == "messages[0].content[1]"
    assert "takes text only" in error["message"]
