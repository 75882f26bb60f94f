"""Prompts of a model with an encoder of text: the encoder reads them, and the decoder starts from its own tokens."""

from collections.abc import Callable
from typing import Any

import httpx2
import msgspec
import openai
import pytest

from tercet.frontend.testing import FakeEngine, Served, decode_spec, serving
from tercet.protocol.messages.encoder_input import EncoderInput
from tercet.protocol.messages.values import ModelLimits, unpack_ints

EngineOf = Callable[..., FakeEngine]
HttpOf = Callable[[Served], httpx2.AsyncClient]
OpenAIOf = Callable[..., openai.AsyncOpenAI]
BODY: dict[str, Any] = {"model": "tiny", "prompt": "hello"}


@pytest.fixture
def reading(limits: ModelLimits, engine_of: EngineOf) -> FakeEngine:
    """An engine whose encoder reads 200 tokens, while its decoder has a context of 128."""
    return engine_of(limits=msgspec.structs.replace(limits, encoder=EncoderInput(tokens=200, start=[7, 9])))


async def test_the_prompt_goes_to_the_encoder(reading: FakeEngine, openai_of: OpenAIOf) -> None:
    async with serving(reading) as served:
        answer = await openai_of(served).completions.create(**BODY)
        [request] = served.engine.requests()
    assert answer.choices[0].text == "Hello world!"
    assert [*unpack_ints(request.input_ids)] == [7, 9] == [*unpack_ints(decode_spec(request).prompt_tail)]
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(unpack_ints(request.encoder_ids)) == 1


async def test_ids_and_the_native_route_go_there_too(reading: FakeEngine, http_of: HttpOf) -> None:
    async with serving(reading) as served:
        answer = await http_of(served).post("/generate", json={"input_ids": [1, 2, 3]})
        [request] = served.engine.requests()
    assert answer.json()["meta_info"]["prompt_tokens"] == 3
    assert [*unpack_ints(request.encoder_ids)] == [1, 2, 3]


@pytest.mark.parametrize(("tokens", "output", "code"), [(200, 126, None), (201, 16, "prompt"), (9, 127, "context")])
async def test_prompt_and_answer_have_limits_of_their_own(
    reading: FakeEngine, http_of: HttpOf, tokens: int, output: int, code: str | None
) -> None:
    async with serving(reading) as served:
        body = {"model": "tiny", "prompt": [5] * tokens, "max_tokens": output}
        answer = await http_of(served).post("/v1/completions", json=body)
    if code is None:
        assert answer.status_code == 200
    else:
        assert answer.status_code == 400
        assert answer.json()["error"]["code"] == "context_length_exceeded"
        assert f"maximum {code} length is" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [({"echo": True}, "echo"), ({"prompt_logprobs": 1}, "prompt_logprobs")],
)
async def test_what_needs_a_prompt_of_the_decoder_is_refused(
    reading: FakeEngine, http_of: HttpOf, fields: dict[str, Any], param: str
) -> None:
    async with serving(reading) as served:
        answer = await http_of(served).post("/v1/completions", json=BODY | fields)
        assert served.engine.requests() == []
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param
    assert answer.json()["error"]["code"] == "unsupported_parameter"
