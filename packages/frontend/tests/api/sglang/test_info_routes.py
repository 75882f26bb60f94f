"""SGLang's endpoints about models and load, and the probe that computes a token."""

import asyncio
from collections.abc import Callable

import httpx2
import pytest

from packages.frontend.tests import encoders
from packages.frontend.tests.polling import until
from tercet.frontend.api.sglang import info_routes
from tercet.frontend.config.config import HttpConfig, ServingConfig
from tercet.frontend.testing import EncodingEngine, FakeEngine, Served, serving
from tercet.protocol.membership.events import Delivery
from tercet.protocol.messages.messages import Heartbeat
from tercet.protocol.messages.values import Load, Phase

EngineOf = Callable[..., FakeEngine]
HttpOf = Callable[[Served], httpx2.AsyncClient]
BUSY = Load(
    queued=3,
    running=2,
    queued_tokens=30,
    running_tokens=50,
    pages_total=10,
    pages_free=4,
    pages_cached=1,
    page_size=16,
    slots_total=8,
    prompt_tokens=100,
    cached_prompt_tokens=25,
)


def beat(engine: FakeEngine, peer: str, load: Load) -> None:
    engine.deliver([Delivery(peer, Heartbeat(phase=Phase.STEP, load=load))])


async def test_model_info_has_the_names_that_sglangs_clients_read(engine_of: EngineOf, http_of: HttpOf) -> None:
    serve = ServingConfig(reasoning_parser="qwen3", tool_call_parser="hermes")
    async with serving(engine_of(), config=serve) as served:
        http = http_of(served)
        info = (await http.get("/model_info")).json()
        assert info == (await http.get("/get_model_info", params={"model": "tiny"})).json()
        unknown = await http.get("/model_info", params={"model": "other"})
    assert info["model_path"] == info["tokenizer_path"] == info["served_model_name"] == "tiny"
    assert (info["is_generation"], info["weight_version"]) == (True, "weights-1")
    assert (info["reasoning_parser"], info["tool_call_parser"]) == ("qwen3", "hermes")
    assert unknown.status_code == 404


async def test_loads_are_those_of_the_last_heartbeats(engine_of: EngineOf, http_of: HttpOf) -> None:
    engine = engine_of(schedulers=["scheduler-1", "scheduler-0"])
    async with serving(engine) as served:
        http = http_of(served)
        beat(engine, "scheduler-1", BUSY)
        loads = (await http.get("/v1/loads", params={"include": "core"})).json()["loads"]
        only = (await http.get("/v1/loads", params={"dp_rank": 1})).json()["loads"]
        older = (await http.get("/get_load")).json()
    assert [each["dp_rank"] for each in loads] == [0, 1]
    for each in loads:
        del each["timestamp"]
    assert only[0]["num_running_reqs"] == 2
    assert len(only) == 1
    assert loads[1] == {
        "dp_rank": 1,
        "num_running_reqs": 2,
        "num_waiting_reqs": 3,
        "num_used_tokens": 80,
        "num_total_tokens": 80,
        "num_active_tokens": 80,
        "max_total_num_tokens": 160,
        "max_running_requests": 8,
        "token_usage": 0.5,
        "cache_hit_rate": 0.25,
        "utilization": 0.25,
        "total_prefill_uncached_tokens": 75,
    }
    assert older[1] == {"dp_rank": 1, "num_reqs": 5, "num_waiting_reqs": 3, "num_tokens": 80}


@pytest.mark.parametrize(("name", "value"), [("include", "core,memry"), ("format", "prometheus"), ("dp_rank", "x")])
async def test_loads_refuse_by_name(engine_of: EngineOf, http_of: HttpOf, name: str, value: str) -> None:
    async with serving(engine_of()) as served:
        answer = await http_of(served).get("/v1/loads", params={name: value})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, name)


async def test_the_probe_computes_one_token(engine_of: EngineOf, http_of: HttpOf) -> None:
    async with serving(engine_of()) as served:
        answer = await http_of(served).get("/health_generate")
        [request] = served.engine.requests()
        assert len(served.manager.requests) == 0
    assert answer.status_code == 200
    assert request.sampling.max_new_tokens == 1


async def test_the_probe_of_an_encoder_makes_one_vector(http_of: HttpOf) -> None:
    engine = EncodingEngine(lambda *_: [], encoders.files(), encoders.limits(), vector=lambda _: [0.5] * 4)
    async with serving(engine) as served:
        assert (await http_of(served).get("/health_generate")).status_code == 200


async def test_a_probe_that_waits_behind_others_succeeds_with_them(
    engine_of: EngineOf, http_of: HttpOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(info_routes, "_PROGRESS_INTERVAL", 0.01)
    engine = engine_of(auto=False)
    async with serving(engine) as served:
        asked = asyncio.ensure_future(http_of(served).get("/health_generate"))
        await until(lambda: bool(engine.requests()))
        assert not asked.done()
        beat(engine, "scheduler-0", Load(output_tokens=5))
        assert (await asked).status_code == 200
        assert len(served.manager.requests) == 0


async def test_a_probe_without_quota_succeeds_with_other_requests(
    engine_of: EngineOf, http_of: HttpOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(info_routes, "_PROGRESS_INTERVAL", 0.01)
    engine = engine_of(auto=False)
    async with serving(engine, HttpConfig(api_key=("user",), max_requests_per_key=1)) as served:
        http, headers = http_of(served), {"authorization": "Bearer user"}
        other = asyncio.ensure_future(http.post("/generate", json={"text": "hello"}, headers=headers))
        await until(lambda: bool(engine.requests()))
        asked = asyncio.ensure_future(http.get("/health_generate", headers=headers))
        await asyncio.sleep(0.05)
        assert not asked.done()
        beat(engine, "scheduler-0", Load(output_tokens=5))
        assert (await asked).status_code == 200
        other.cancel()


async def test_a_probe_without_a_token_fails(
    engine_of: EngineOf, http_of: HttpOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(info_routes, "_PROBE_SECONDS", 0.05)
    async with serving(engine_of(auto=False)) as served:
        assert (await http_of(served).get("/health_generate")).status_code == 503
        assert len(served.manager.requests) == 0


async def test_a_probe_needs_a_key(engine_of: EngineOf, http_of: HttpOf) -> None:
    async with serving(engine_of(), HttpConfig(api_key=("user",))) as served:
        assert (await http_of(served).get("/health_generate")).status_code == 401
