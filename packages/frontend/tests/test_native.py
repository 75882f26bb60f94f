"""/generate, /tokenize, /detokenize and /server_info."""

import itertools
import json
from collections.abc import Callable
from typing import Any

import httpx2
import pytest
from tokenizers import Tokenizer

from tercet.frontend.testing import DETOKENIZER, FakeEngine, Served, decode_spec, serving
from tercet.protocol.events import Delivery
from tercet.protocol.messages import Heartbeat
from tercet.protocol.values import Load, Phase, unpack_ints

EngineOf = Callable[..., FakeEngine]
HttpOf = Callable[[Served], httpx2.AsyncClient]


async def test_generate_answers_in_sglangs_shape(engine_of: EngineOf, http_of: HttpOf) -> None:
    body = {
        "text": "hello",
        "sampling_params": {
            "max_new_tokens": 3,
            "temperature": 0,
            "stop": ["END"],
            "top_k": -1,
            "sampling_seed": 4,
            "no_stop_trim": True,
        },
        "return_logprob": True,
        "top_logprobs_num": 1,
    }
    async with serving(engine_of()) as served:
        answer = (await http_of(served).post("/generate", json=body)).json()
        [request] = served.engine.requests()
    assert (answer["text"], answer["output_ids"]) == ("Hello world", [10, 11, 12])
    meta = answer["meta_info"]
    assert meta["finish_reason"] == {"type": "length", "matched": None}
    assert meta["completion_tokens"] == 3
    assert meta["output_token_logprobs"] == [[-0.5, 10, None], [-0.5, 11, None], [-0.5, 12, None]]
    assert meta["output_top_logprobs"] == [[[-0.5, 10, None]], [[-0.5, 11, None]], [[-0.5, 12, None]]]
    assert (request.sampling.temperature, request.sampling.top_k, request.sampling.seed) == (0, 0, 4)
    assert (decode_spec(request).stop, decode_spec(request).include_stop) == (["END"], True)


async def test_generate_streams_the_text_so_far(engine_of: EngineOf, http_of: HttpOf) -> None:
    async with serving(engine_of()) as served:
        answer = await http_of(served).post("/generate", json={"input_ids": [5, 6], "stream": True})
        [request] = served.engine.requests()
    *events, done = answer.text.strip().split("\n\n")
    shown = [json.loads(event.removeprefix("data: ")) for event in events]
    assert done == "data: [DONE]"
    assert list(unpack_ints(request.input_ids)) == [5, 6]
    assert all(later["text"].startswith(earlier["text"]) for earlier, later in itertools.pairwise(shown))
    assert shown[-1]["text"] == "Hello world!"
    assert shown[-1]["output_ids"] == [10, 11, 12, 13]
    assert shown[-1]["meta_info"]["finish_reason"]["type"] == "stop"


async def test_generate_gives_a_list_for_several_choices(engine_of: EngineOf, http_of: HttpOf) -> None:
    async with serving(engine_of()) as served:
        answer = await http_of(served).post("/generate", json={"text": "hello", "sampling_params": {"n": 2}})
    assert [each["index"] for each in answer.json()] == [0, 1]


@pytest.mark.parametrize("body", [{}, {"text": "a", "input_ids": [1]}, {"text": "a", "nonsense": 1}])
async def test_generate_takes_one_prompt(engine_of: EngineOf, http_of: HttpOf, body: dict[str, Any]) -> None:
    async with serving(engine_of()) as served:
        assert (await http_of(served).post("/generate", json=body)).status_code == 400


ASKED = [{"role": "user", "content": "hello"}]


async def test_tokenize_and_detokenize(engine_of: EngineOf, http_of: HttpOf, tokenizer: Tokenizer) -> None:
    text = "the quick <|im_end|> fox"
    async with serving(engine_of()) as served:
        http = http_of(served)
        ids = (await http.post("/tokenize", json={"prompt": text})).json()
        back = (await http.post("/detokenize", json={"tokens": ids["tokens"]})).json()
        bare = (await http.post("/detokenize", json={"tokens": ids["tokens"], "skip_special_tokens": True})).json()
        wrong = await http.post("/detokenize", json={"tokens": [99999]})
        chat = (await http.post("/tokenize", json={"messages": ASKED})).json()
        tools = [{"type": "function", "function": {"name": "look_up"}}]
        told = (await http.post("/tokenize", json={"messages": ASKED, "tools": tools})).json()
        lost = await http.post("/tokenize", json={"prompt": text, "tools": tools})
        other = await http.post("/tokenize", json={"prompt": text, "model": "other"})
    assert ids == {"tokens": tokenizer.encode(text).ids, "count": len(ids["tokens"]), "max_model_len": 128}
    assert back["text"] == text
    assert bare["text"] == "the quick  fox"
    assert wrong.status_code == 400
    assert chat["tokens"] == tokenizer.encode("<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n").ids
    assert "look_up" in tokenizer.decode(told["tokens"])
    assert lost.status_code == 400
    assert other.status_code == 404


async def test_without_a_model_there_is_nothing_to_tokenize_with(engine_of: EngineOf, http_of: HttpOf) -> None:
    async with serving(engine_of(), connect=False) as served:
        assert (await http_of(served).post("/tokenize", json={"prompt": "x"})).status_code == 503


async def test_server_info_tells_limits_and_load(engine_of: EngineOf, http_of: HttpOf) -> None:
    async with serving(engine_of()) as served:
        load = Load(running=3, pages_total=100, pages_free=40)
        served.engine.deliver([Delivery("scheduler-0", Heartbeat(phase=Phase.STEP, load=load))])
        await http_of(served).post("/generate", json={"text": "hello"})
        info = (await http_of(served).get("/server_info")).json()
    assert info["ready"] is True
    assert info["requests_ended"] == {"finished": 1}
    assert info["models"][0]["context_length"] == 128
    assert info["models"][0]["grammars"] == "llguidance 1.9.1"
    [scheduler] = info["schedulers"]
    assert (scheduler["peer"], scheduler["phase"]) == ("scheduler-0", "step")
    assert (scheduler["load"]["running"], scheduler["load"]["pages_free"]) == (3, 40)
    assert [each["peer"] for each in info["detokenizers"]] == [DETOKENIZER]
