"""Requests with an adapter: messages to schedulers, answers to clients, routing."""

import asyncio
import hashlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx2
import msgspec
import openai
import pytest

from tercet.frontend.config.config import ServingConfig, StoreConfig
from tercet.frontend.manager.req_state import ReqState
from tercet.frontend.manager.request import GenerateRequest, GenerationOptions
from tercet.frontend.model.prompts import TokenPrompt
from tercet.frontend.model.served_model import ModelFiles, ServedModel
from tercet.frontend.routing.peers import SchedulerPeer
from tercet.frontend.routing.poison import fingerprint
from tercet.frontend.routing.policies import CacheAware
from tercet.frontend.routing.request_state import SingleWaiterEvent
from tercet.frontend.testing import FakeEngine, Served, serving
from tercet.protocol.messages.messages import Message, Rejected, TokenizedGenerateReqInput
from tercet.protocol.messages.values import LoRAAdapter, ModelIdentity, ModelLimits, SamplingParams

EngineOf = Callable[..., FakeEngine]
HttpOf = Callable[[Served], httpx2.AsyncClient]
OpenAIOf = Callable[..., openai.AsyncOpenAI]
GIVEN = ServingConfig(lora=("haiku=/haiku", "sonnet=/sonnet"))
MESSAGES = [{"role": "user", "content": "hello"}]


def read(path: str) -> LoRAAdapter:
    return LoRAAdapter(path, hashlib.sha256(path.encode()).hexdigest())


async def learnt(served: Served) -> None:
    async with asyncio.timeout(10):
        while served.manager.adapters.pending:  # noqa: ASYNC110 - they tell nobody
            await asyncio.sleep(0.001)


@pytest.fixture
async def served(adapting: EngineOf, tmp_path: Path) -> AsyncIterator[Served]:
    """Start a frontend that has loaded both adapters."""
    store = StoreConfig(response_store=str(tmp_path / "r.sqlite"))
    async with serving(adapting(), config=GIVEN, store=store) as opened:
        await learnt(opened)
        yield opened


@pytest.mark.parametrize("model", ["haiku", "tiny:haiku"])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": MESSAGES}),
        ("/v1/completions", {"prompt": "hello"}),
        ("/v1/completions", {"prompt": ["hello", "world"]}),
        ("/v1/responses", {"input": "hello"}),
        ("/v1/messages", {"messages": MESSAGES, "max_tokens": 9}),
        ("/generate", {"text": "hello"}),
    ],
)
async def test_whatever_generates_takes_an_adapter_as_its_model(
    served: Served, http_of: HttpOf, path: str, body: dict[str, Any], model: str
) -> None:
    answer = await http_of(served).post(path, json={**body, "model": model})
    assert answer.status_code == 200, answer.text
    assert answer.json().get("model", model) == model
    assert {each.lora for each in served.engine.requests()} == {read("/haiku")}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/tokenize", {"prompt": "hello"}),
        ("/detokenize", {"tokens": [5]}),
        ("/v1/messages/count_tokens", {"messages": MESSAGES}),
        ("/v1/responses/input_tokens", {"input": "hello"}),
    ],
)
async def test_texts_are_an_adapters_as_they_are_its_models(
    served: Served, http_of: HttpOf, path: str, body: dict[str, Any]
) -> None:
    told = [(await http_of(served).post(path, json={**body, "model": model})).json() for model in ("tiny", "haiku")]
    assert told[0] == told[1]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/embeddings", {"input": "hello"}),
        ("/v1/classify", {"input": "hello"}),
        ("/v1/rerank", {"query": "a", "documents": ["b"]}),
        ("/v1/score", {"text_1": "a", "text_2": "b"}),
    ],
)
async def test_vectors_and_scores_have_no_adapters(
    served: Served, http_of: HttpOf, path: str, body: dict[str, Any]
) -> None:
    refused = await http_of(served).post(path, json={**body, "model": "haiku"})
    error = refused.json()["error"]
    assert (refused.status_code, error["param"]) == (400, "model")
    assert "adapter" in error["message"]


async def test_a_model_is_what_it_was(served: Served, http_of: HttpOf) -> None:
    http = http_of(served)
    answers = [
        (await http.post("/v1/completions", json={"model": model, "prompt": "hello"})).json()
        for model in ("tiny", "haiku", "sonnet", "haiku")
    ]
    assert [each.lora for each in served.engine.requests()] == [None, read("/haiku"), read("/sonnet"), read("/haiku")]
    first, second, third, fourth = (each["system_fingerprint"] for each in answers)
    assert len({first, second, third}) == 3
    assert second == fourth


async def test_streams_tell_the_adapter(served: Served, openai_of: OpenAIOf) -> None:
    stream = await openai_of(served, strict=False).completions.create(model="haiku", prompt="hello", stream=True)
    assert {chunk.model async for chunk in stream} == {"haiku"}


async def test_a_response_goes_on_with_the_model_it_names(served: Served, openai_of: OpenAIOf) -> None:
    client = openai_of(served)
    first = await client.responses.create(model="haiku", input="hello")
    again = await client.responses.create(model="haiku", input="and", previous_response_id=first.id)
    other = await client.responses.create(model="tiny", input="and", previous_response_id=first.id)
    assert [each.model for each in (first, again, other)] == ["haiku", "haiku", "tiny"]
    assert (await client.responses.retrieve(first.id)).model == "haiku"
    assert [each.lora for each in served.engine.requests()] == [read("/haiku"), read("/haiku"), None]


@pytest.mark.parametrize("model", ["haiku", "tiny:haiku"])
async def test_a_background_response_is_begun_again_with_its_adapter(
    adapting: EngineOf, openai_of: OpenAIOf, tmp_path: Path, model: str
) -> None:
    store = StoreConfig(response_store=str(tmp_path / "r.sqlite"))
    async with serving(adapting(auto=False), config=GIVEN, store=store) as dying:
        await learnt(dying)
        queued = await openai_of(dying).responses.create(model=model, input="hello", background=True)
    engine = adapting()
    async with serving(engine, config=GIVEN, store=store, peer="frontend-1") as heir, asyncio.timeout(20):
        client = openai_of(heir)
        made = await client.responses.retrieve(queued.id)
        while made.status in {"queued", "in_progress"}:
            await asyncio.sleep(0.02)
            made = await client.responses.retrieve(queued.id)
    assert (made.status, made.model, made.output_text) == ("completed", model, "Hello world!")
    assert [each.lora for each in engine.requests()] == [read("/haiku")]


async def test_a_session_goes_on_with_an_adapter(served: Served, http_of: HttpOf) -> None:
    http = http_of(served)
    session = (await http.post("/open_session", json={"capacity_of_str_len": 99})).json()
    turn: dict[str, Any] = {"text": "hello", "lora_path": "haiku"}
    rid = (await http.post("/generate", json={**turn, "session_params": {"id": session}})).json()["meta_info"]["id"]
    answer = await http.post("/generate", json={**turn, "session_params": {"id": session, "rid": rid}})
    assert answer.status_code == 200
    first, second = served.engine.requests()
    assert first.lora == second.lora == read("/haiku")
    assert second.input_ids.startswith(first.input_ids)


async def test_a_list_of_prompts_may_have_an_adapter_each(served: Served, http_of: HttpOf) -> None:
    body = {"text": ["hello", "world", "again"], "lora_path": ["haiku", None, "sonnet"]}
    answer = await http_of(served).post("/generate", json=body)
    assert (answer.status_code, len(answer.json())) == (200, 3)
    assert [each.lora for each in served.engine.requests()] == [read("/haiku"), None, read("/sonnet")]


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ({"text": "a", "lora_path": "haiku"}, ["/haiku"]),
        ({"text": "a", "lora_path": "tiny:haiku", "model": "tiny"}, ["/haiku"]),
        ({"text": ["a", "b"], "lora_path": "haiku"}, ["/haiku", "/haiku"]),
        ({"input_ids": [[5], [6]], "lora_path": [None, "haiku"]}, [None, "/haiku"]),
        ({"input_ids": [[5], [6]], "lora_path": [None, None], "model": "haiku"}, ["/haiku", "/haiku"]),
        ({"text": "a", "lora_path": None}, [None]),
    ],
)
async def test_sglangs_way_to_name_adapters(
    served: Served, http_of: HttpOf, more: dict[str, Any], expected: list[str | None]
) -> None:
    assert (await http_of(served).post("/generate", json=more)).status_code == 200
    assert [each.lora and each.lora.path for each in served.engine.requests()] == expected


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ({"text": "a", "lora_path": "limerick"}, 404),
        ({"text": "a", "lora_path": "tiny"}, 400),
        ({"text": "a", "lora_path": "haiku", "model": "haiku"}, 400),
        ({"text": "a", "lora_path": ["haiku"]}, 400),
        ({"text": ["a", "b"], "lora_path": ["haiku"]}, 400),
        ({"text": ["a"], "lora_path": []}, 400),
        ({"text": "a", "lora_path": "n" * 513}, 400),
        ({"text": "a", "lora_path": {"name": "haiku"}}, 400),
    ],
)
async def test_adapters_that_cannot_be_meant(
    served: Served, http_of: HttpOf, body: dict[str, Any], status: int
) -> None:
    refused = await http_of(served).post("/generate", json=body)
    assert refused.status_code == status
    assert refused.json()["error"]["param"].startswith("lora_path")
    assert served.engine.requests() == []


# Schedulers that cannot read it.


def unreadable(attempts: int, *, retry: bool) -> Callable[[TokenizedGenerateReqInput], Message | None]:
    """Reject this number of attempts."""

    def reject(request: TokenizedGenerateReqInput) -> Message | None:
        if request.attempt >= attempts:
            return None
        message = "the files have changed"
        return Rejected(rid=request.rid, attempt=request.attempt, code="invalid_lora", message=message, retry=retry)

    return reject


async def test_what_one_scheduler_cannot_read_another_may(adapting: EngineOf, http_of: HttpOf) -> None:
    engine = adapting(schedulers=["scheduler-0", "scheduler-1"], reject=unreadable(1, retry=True))
    async with serving(engine, config=GIVEN) as served:
        await learnt(served)
        answer = await http_of(served).post("/v1/completions", json={"model": "haiku", "prompt": "hello"})
    assert answer.status_code == 200
    tried = [peer for peer, message in engine.sent if isinstance(message, TokenizedGenerateReqInput)]
    assert sorted(tried) == ["scheduler-0", "scheduler-1"]
    assert [each.lora for each in engine.requests()] == [read("/haiku"), read("/haiku")]


@pytest.mark.parametrize("retry", [True, False])
@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/completions", {"model": "haiku", "prompt": "hello"}, "model"),
        ("/generate", {"lora_path": "haiku", "text": "hello"}, "lora_path"),
    ],
)
async def test_what_no_scheduler_can_read_is_the_clients_to_know(
    adapting: EngineOf, http_of: HttpOf, path: str, body: dict[str, Any], param: str, retry: bool
) -> None:
    engine = adapting(schedulers=["scheduler-0", "scheduler-1"], reject=unreadable(9, retry=retry))
    async with serving(engine, config=GIVEN) as served:
        await learnt(served)
        refused = await http_of(served).post(path, json=body)
    error = refused.json()["error"]
    assert (refused.status_code, error["code"], error["param"]) == (400, "invalid_lora", param)
    assert error["message"] == "the files have changed"
    assert len(engine.requests()) == (2 if retry else 1)


async def test_what_cannot_be_read_any_more_is_not_waited_for(adapting: EngineOf, http_of: HttpOf) -> None:
    """Lack of room passes, so running requests wait for it; missing files do not come back."""
    engine = adapting(auto=False)
    async with serving(engine, config=GIVEN) as served:
        await learnt(served)
        asked = asyncio.create_task(
            http_of(served).post("/v1/completions", json={"model": "haiku", "prompt": "hello", "max_tokens": 9})
        )
        async with asyncio.timeout(10):
            while not engine.running:  # noqa: ASYNC110 - the engine tells nobody
                await asyncio.sleep(0.001)
            engine.step()
            engine.reject = unreadable(9, retry=True)
            engine.down("scheduler-0")
            engine.scheduler_up("scheduler-0", "2")
            refused = await asked
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "invalid_lora")
    assert len(engine.requests()) == 2


async def test_it_waits_for_a_scheduler_that_runs_adapters(
    adapting: EngineOf, http_of: HttpOf, limits: ModelLimits
) -> None:
    engine = adapting()
    able = engine.limits
    async with serving(engine, config=GIVEN) as served:
        await learnt(served)
        engine.limits = limits
        engine.scheduler_up("scheduler-1")
        engine.down("scheduler-0")
        http = http_of(served)
        asked = asyncio.create_task(http.post("/v1/completions", json={"model": "haiku", "prompt": "hello"}))
        assert (await http.post("/v1/completions", json={"model": "tiny", "prompt": "hello"})).status_code == 200
        assert served.manager.waiting == 1
        engine.limits = able
        engine.scheduler_up("scheduler-0", "2")
        assert (await asked).status_code == 200
    where = [(peer, bool(each.lora)) for peer, each in engine.sent if isinstance(each, TokenizedGenerateReqInput)]
    assert where == [("scheduler-1", False), ("scheduler-0", True)]


# Distinguishing requests.


@pytest.fixture
def state_of(files: dict[str, bytes], limits: ModelLimits) -> Callable[..., ReqState]:
    model = ServedModel("tiny", ModelFiles(files), limits, ModelIdentity(weights="w"))
    sampling = SamplingParams(max_new_tokens=1)

    def make(lora: LoRAAdapter | None, cache_salt: str = "", rid: str = "r") -> ReqState:
        options = GenerationOptions(cache_salt=cache_salt)
        request = GenerateRequest(model="tiny", prompt=TokenPrompt([]), options=options, lora=lora)
        return ReqState(rid, request, model, list(range(100)), sampling, SingleWaiterEvent())

    return make


def test_equal_prompts_of_other_adapters_share_nothing(state_of: Callable[..., ReqState]) -> None:
    moved = LoRAAdapter("/elsewhere", read("/haiku").sha256)
    changed = LoRAAdapter("/haiku", "0" * 64)
    adapters = [None, read("/haiku"), read("/sonnet"), changed]
    states = [state_of(lora, salt) for lora in adapters for salt in ("", "salt")]
    assert len({state.salt for state in states}) == 8
    assert len({fingerprint(state_of(lora)) for lora in adapters}) == 4
    assert state_of(moved).salt == state_of(read("/haiku")).salt
    assert fingerprint(state_of(moved)) == fingerprint(state_of(read("/haiku")))


def test_each_adapters_prompts_go_where_its_own_went(state_of: Callable[..., ReqState], limits: ModelLimits) -> None:
    policy, schedulers = CacheAware(), [SchedulerPeer(f"s{number}", "1", limits=limits) for number in range(2)]
    homes = {}
    for lora in (read("/haiku"), read("/sonnet")):
        homes[lora] = policy.order(state_of(lora), schedulers)[0]
        policy.on_dispatched(state_of(lora), homes[lora])
    assert homes[read("/haiku")] is not homes[read("/sonnet")]
    for lora, home in homes.items():
        assert [policy.order(state_of(lora), schedulers)[0] for _ in range(3)] == [home] * 3


async def test_a_grammar_and_an_adapter_want_a_scheduler_that_has_both(
    adapting: EngineOf, http_of: HttpOf, limits: ModelLimits
) -> None:
    engine = adapting()
    both = engine.limits
    async with serving(engine, config=GIVEN) as served:
        await learnt(served)
        engine.limits = limits
        engine.scheduler_up("scheduler-1")
        engine.limits = msgspec.structs.replace(both, grammars="")
        engine.scheduler_up("scheduler-2")
        assert [each.peer for each in served.manager.fleet.schedulers.values()] == [f"scheduler-{n}" for n in range(3)]
        body = {"model": "haiku", "prompt": "hello", "regex": "a"}
        for _ in range(4):
            answer = await http_of(served).post("/v1/completions", json=body)
            assert answer.status_code == 200, answer.text
    where = {peer for peer, each in engine.sent if isinstance(each, TokenizedGenerateReqInput)}
    assert where == {"scheduler-0"}
