"""The endpoints /generate, /tokenize, /detokenize and /server_info."""

import asyncio
import itertools
import json
from collections.abc import Callable
from typing import Any

import httpx2
import pytest
from tokenizers import Tokenizer

from tercet.frontend.api.sglang.generate_writer import GenerateWriter
from tercet.frontend.manager.quota import ApiKeyQuota
from tercet.frontend.manager.req_state import Generation, GenerationUpdate, OutputRow, ReqState, Verdict
from tercet.frontend.manager.request import GenerateRequest, GenerationOptions
from tercet.frontend.model.prompts import TextPrompt
from tercet.frontend.model.served_model import ModelFiles, ServedModel
from tercet.frontend.testing import DETOKENIZER, FakeEngine, Served, Token, decode_spec, serving
from tercet.protocol.membership.events import Delivery
from tercet.protocol.messages.messages import Heartbeat, TokenizedGenerateReqInput
from tercet.protocol.messages.values import (
    Load,
    LogprobParams,
    Logprobs,
    ModelIdentity,
    ModelLimits,
    Phase,
    SamplingParams,
    pack_floats,
    unpack_ints,
)

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
    assert meta["finish_reason"] == {"type": "length", "matched": None, "length": 3}
    assert meta["completion_tokens"] == 3
    assert meta["output_token_logprobs"] == [[-0.5, 10, None], [-0.5, 11, None], [-0.5, 12, None]]
    assert meta["output_top_logprobs"] == [[[-0.5, 10, None]], [[-0.5, 11, None]], [[-0.5, 12, None]]]
    assert (request.sampling.temperature, request.sampling.top_k, request.sampling.seed) == (0, 0, 4)
    assert (decode_spec(request).stop, decode_spec(request).include_stop) == (["END"], True)


async def test_meta_info_has_the_latency_and_the_version_of_the_weights(engine_of: EngineOf, http_of: HttpOf) -> None:
    async with serving(engine_of(auto=False)) as served:
        http = http_of(served)
        served.manager.weights.name_versions("step-7")
        began = served.manager.requests.clock()
        stream = asyncio.create_task(http.post("/generate", json={"input_ids": [5], "stream": True}))
        whole = asyncio.create_task(http.post("/generate", json={"input_ids": [[5], [6]]}))
        while len(served.engine.running) < 3:  # noqa: ASYNC110 - the engine sends no event
            await asyncio.sleep(0.001)
        while served.engine.running:
            served.engine.step()
            await asyncio.sleep(0.01)
        events = [json.loads(line[6:]) for line in (await stream).text.splitlines() if line.startswith("data: {")]
        metas = [each["meta_info"] for each in [*events, *(await whole).json()]]
        seconds = served.manager.requests.clock() - began
    assert {each["weight_version"] for each in metas} == {"step-7"}
    assert ["e2e_latency" in each for each in metas] == [False] * (len(events) - 1) + [True] * 3
    assert len(events) > 2
    assert all(0.02 < each["e2e_latency"] < seconds for each in metas if each["finish_reason"])


async def test_a_version_is_that_of_the_weights_that_computed_a_prompt(engine_of: EngineOf, http_of: HttpOf) -> None:
    body = {"input_ids": [[5], [6]], "sampling_params": [{"max_new_tokens": 1}, {"max_new_tokens": 2}]}
    async with serving(engine_of(auto=False)) as served:
        answer = asyncio.create_task(http_of(served).post("/generate", json=body))
        while len(served.engine.running) < 2:  # noqa: ASYNC110 - the engine sends no event
            await asyncio.sleep(0.001)
        served.engine.step()
        await served.manager.weights.update("/checkpoints/8", version="8")
        served.engine.step()
        metas = [each["meta_info"] for each in (await answer).json()]
    assert [each["weight_version"] for each in metas] == ["weights-1", "8"]


async def test_every_event_of_a_stream_has_the_ids_of_its_prompt(engine_of: EngineOf, http_of: HttpOf) -> None:
    body = {"input_ids": [[5, 6], [7]], "stream": True, "return_prompt_token_ids": True}
    async with serving(engine_of()) as served:
        answer = await http_of(served).post("/generate", json=body)
    events = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
    assert len(events) > 2
    assert all(each["prompt_token_ids"] == [[5, 6], [7]][each["index"]] for each in events)


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


def test_a_token_that_comes_while_an_event_is_made_belongs_to_the_next(
    files: dict[str, bytes], limits: ModelLimits
) -> None:
    sampling = SamplingParams(max_new_tokens=8, seed=5)
    request = GenerateRequest(model="tiny", prompt=TextPrompt("x"), options=GenerationOptions(logprobs=LogprobParams()))
    generation = Generation(ApiKeyQuota().acquire())
    model = ServedModel("tiny", ModelFiles(files), limits, ModelIdentity(weights="w"))
    state = ReqState("f-1", request, model, [1], sampling, generation.wake)
    state.attempt = 0
    generation.states.append(state)

    def accept(position: int, text: str) -> None:
        scores = Logprobs(chosen=pack_floats([-0.5]))
        assert state.accept(OutputRow(0, 0, position, [10 + position], text, None, None, scores)) is Verdict.ACCEPTED

    form = GenerateWriter()
    told = []
    accept(0, "a")
    for position in (1, 2):
        [update] = state.pop_updates()
        accept(position, "b")
        told.append(json.loads(form.events(generation, [GenerationUpdate(0, update)]).removeprefix(b"data: ")))
    assert [each["output_ids"] for each in told] == [[10], [10, 11]]
    assert [each["meta_info"]["completion_tokens"] for each in told] == [1, 2]
    assert told[-1]["meta_info"]["output_token_logprobs"] == [[-0.5, 10, None], [-0.5, 11, None]]


async def test_generate_gives_a_list_for_several_choices(engine_of: EngineOf, http_of: HttpOf) -> None:
    async with serving(engine_of()) as served:
        answer = await http_of(served).post("/generate", json={"text": "hello", "sampling_params": {"n": 2}})
    assert [each["index"] for each in answer.json()] == [0, 1]


async def test_generate_scores_as_much_of_the_prompt_as_is_asked_for(engine_of: EngineOf, http_of: HttpOf) -> None:
    body = {"input_ids": [5, 6, 7], "return_logprob": True, "top_logprobs_num": 1}
    async with serving(engine_of()) as served:
        ask = http_of(served).post
        metas = {
            start: (await ask("/generate", json={**body, "logprob_start_len": start})).json()["meta_info"]
            for start in (None, -1, 0, 2, 3)
        }
        wanted = [request.logprobs.prompt for request in served.engine.requests() if request.logprobs]
        streamed = await ask("/generate", json={**body, "logprob_start_len": 0, "stream": True})
        scored = (
            await ask("/generate", json={**body, "logprob_start_len": 0, "sampling_params": {"max_new_tokens": 0}})
        ).json()
        await ask("/generate", json={"input_ids": [5], "logprob_start_len": 0})
        assert served.engine.requests()[-1].logprobs is None
    whole = [[None, 5, None], [-1.0, 6, None], [-2.0, 7, None]]
    told = [metas[start]["input_token_logprobs"] for start in (None, -1, 0, 2, 3)]
    assert told == [[], [], whole, whole[2:], []]
    assert metas[0]["input_top_logprobs"] == [None, [[-1.0, 6, None]], [[-2.0, 7, None]]]
    assert wanted == [False, False, True, True, True]
    events = [json.loads(line[6:]) for line in streamed.text.splitlines() if line.startswith("data: {")]
    assert [each["meta_info"]["input_token_logprobs"] for each in events] == [whole] * 4
    for field in ("output_token_logprobs", "output_top_logprobs"):
        assert [each["meta_info"][field] for each in events] == [metas[0][field][: 1 + told] for told in range(4)]
    assert (scored["text"], scored["output_ids"], scored["meta_info"]["completion_tokens"]) == ("", [], 0)
    assert scored["meta_info"]["input_token_logprobs"] == whole


async def test_generate_biases_tokens(engine_of: EngineOf, http_of: HttpOf) -> None:
    async with serving(engine_of()) as served:
        ask = http_of(served).post
        await ask("/generate", json={"text": "hello", "sampling_params": {"logit_bias": {"5": -100, "6": 2.5}}})
        for bias in ({"five": 1}, {"5": 101}, {"99999": 1}):
            refused = await ask("/generate", json={"text": "hello", "sampling_params": {"logit_bias": bias}})
            assert (refused.status_code, "logit_bias" in refused.json()["error"]["param"]) == (400, True)
        [request] = served.engine.requests()
    assert request.sampling.logit_bias == {5: -100.0, 6: 2.5}


@pytest.mark.parametrize(
    "prompts", [{"text": ["the quick", "the"]}, {"input_ids": [[5, 6], [7]]}], ids=["text", "input_ids"]
)
async def test_generate_answers_a_list_of_prompts_with_a_list(
    engine_of: EngineOf, http_of: HttpOf, prompts: dict[str, Any]
) -> None:
    def told(request: TokenizedGenerateReqInput, index: int) -> list[Token]:
        return [Token(10, f"{len(unpack_ints(request.input_ids))}"), Token(11, f".{index}")]

    async with serving(engine_of(told)) as served:
        ask = http_of(served).post
        whole = (await ask("/generate", json={**prompts, "sampling_params": {"n": 2}})).json()
        single = (await ask("/generate", json={name: each[:1] for name, each in prompts.items()})).json()
        streamed = await ask("/generate", json={**prompts, "stream": True})
    assert [(each["index"], each["text"]) for each in whole] == [(0, "2.0"), (1, "2.1"), (2, "1.0"), (3, "1.1")]
    assert [each["meta_info"]["prompt_tokens"] for each in whole] == [2, 2, 1, 1]
    assert [each["text"] for each in single] == ["2.0"]
    events = [json.loads(line[6:]) for line in streamed.text.splitlines() if line.startswith("data: {")]
    assert {each["index"]: each["text"] for each in events} == {0: "2.0", 1: "1.0"}


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"text": ["a"], "rid": "mine"}, "rid"),
        ({"cache_salt": "a", "extra_key": "b"}, "extra_key"),
        ({"no_logs": True}, "no_logs"),
        ({"sampling_params": {"stop_regex": "a"}}, "sampling_params.stop_regex"),
        ({"sampling_params": {"custom_params": {"a": 1}}}, "sampling_params.custom_params"),
        ({"sampling_params": {"beam_width": 2}}, "sampling_params.beam_width"),
        ({"return_routed_experts": True}, "return_routed_experts"),
        ({"image_data": ["https://example.org/a.png"]}, "image_data[0]"),
        ({"token_ids_logprob": [1]}, "token_ids_logprob"),
        ({"text": ["a", "b"], "session_params": {"id": "s"}}, "session_params"),
        ({"text": ["a"] * 1025, "sampling_params": {"n": 2}}, "sampling_params.n"),
        ({"text": []}, "text"),
        ({"text": None, "input_ids": [[]]}, "input_ids[0]"),
        ({"text": None, "input_ids": []}, "input_ids"),
        ({"text": None, "input_ids": [1, "x"]}, "input_ids[1]"),
    ],
)
async def test_generate_refuses_by_name(engine_of: EngineOf, http_of: HttpOf, more: dict[str, Any], param: str) -> None:
    async with serving(engine_of()) as served:
        answer = await http_of(served).post("/generate", json={"text": "hello", **more})
        assert served.engine.requests() == []
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


async def test_what_sglangs_benchmark_sends_is_taken(engine_of: EngineOf, http_of: HttpOf) -> None:
    asked: dict[str, Any] = {
        "text": "hello",
        "sampling_params": {"temperature": 0.0, "max_new_tokens": 4, "ignore_eos": True},
        "stream": True,
        "lora_path": None,
        "return_logprob": False,
        "return_routed_experts": False,
        "logprob_start_len": -1,
    }
    async with serving(engine_of()) as served:
        answer = await http_of(served).post("/generate", json=asked)
    assert answer.status_code == 200, answer.text
    *_, last, done = [line[6:] for line in answer.text.splitlines() if line]
    assert (json.loads(last)["text"], done) == ("Hello world!", "[DONE]")


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
    assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "tokens")
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


async def test_several_texts_are_tokenized_each_alone(
    engine_of: EngineOf, http_of: HttpOf, tokenizer: Tokenizer
) -> None:
    texts = ["hello world", "", "<|im_start|>fox"]
    async with serving(engine_of()) as served:
        http = http_of(served)
        several = (await http.post("/tokenize", json={"prompt": texts, "return_token_strs": True})).json()
        alone = [
            (await http.post("/tokenize", json={"prompt": text, "return_token_strs": True})).json() for text in texts
        ]
        plain = (await http.post("/tokenize", json={"prompt": "hello"})).json()
    assert several["tokens"] == [tokenizer.encode(text).ids for text in texts]
    assert several["token_strs"] == [tokenizer.encode(text).tokens for text in texts]
    assert several["count"] == list(map(len, several["tokens"]))
    for name in ("tokens", "token_strs", "count"):
        assert several[name] == [each[name] for each in alone]
    assert "token_strs" not in plain


async def test_a_chat_to_continue_is_tokenized_as_it_is_generated(engine_of: EngineOf, http_of: HttpOf) -> None:
    chat = {"messages": [*ASKED, {"role": "assistant", "content": "The quick"}], "continue_final_message": True}
    async with serving(engine_of()) as served:
        http = http_of(served)
        told = (await http.post("/tokenize", json=chat)).json()
        answer = await http.post("/v1/chat/completions", json={"model": "tiny", **chat})
        assert answer.status_code == 200, answer.text
        [request] = served.engine.requests()
        refused = [
            await http.post("/tokenize", json={**chat, "add_generation_prompt": True}),
            await http.post("/tokenize", json={**chat, "messages": ASKED}),
            await http.post("/tokenize", json={"prompt": "hello", "continue_final_message": True}),
        ]
    assert told["tokens"] == list(unpack_ints(request.input_ids))
    assert {each.json()["error"]["param"] for each in refused} == {"continue_final_message"}


async def test_several_lists_of_ids_are_decoded_each_alone(engine_of: EngineOf, http_of: HttpOf) -> None:
    async with serving(engine_of()) as served:
        http = http_of(served)
        ids = [(await http.post("/tokenize", json={"prompt": text})).json()["tokens"] for text in ("hello", "fox")]
        several = (await http.post("/detokenize", json={"tokens": [*ids, []]})).json()
        wrong = await http.post("/detokenize", json={"tokens": [ids[0], [99999]]})
    assert several == {"prompt": ["hello", "fox", ""], "text": ["hello", "fox", ""]}
    assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "tokens[1]")
