"""Series under vLLM's and SGLang's names, read as the Gateway API Inference Extension reads them."""

import asyncio
import time
from collections.abc import Callable
from typing import NamedTuple

import httpx2
from prometheus_client.parser import text_string_to_metric_families

from tercet.frontend.config.config import ServingConfig
from tercet.frontend.lora.registry import AdapterRegistry
from tercet.frontend.testing import FakeEngine, Served, serving
from tercet.protocol.membership.events import Delivery, PeerUp
from tercet.protocol.messages.messages import Heartbeat
from tercet.protocol.messages.values import Load, Phase, Role

EngineOf = Callable[..., FakeEngine]
HttpOf = Callable[[Served], httpx2.AsyncClient]


class Sample(NamedTuple):
    """Only sample of a gauge."""

    value: float
    labels: dict[str, str]


async def gauges(http: httpx2.AsyncClient) -> dict[str, Sample]:
    """Return the gauges of other servers, each of which must have one sample, which a gateway takes."""
    found = {}
    for family in text_string_to_metric_families((await http.get("/metrics")).text):
        if ":" in family.name:
            (sample,) = family.samples
            assert family.type == "gauge"
            found[family.name] = Sample(sample.value, sample.labels)
    return found


async def test_a_model_has_the_totals_of_its_schedulers(engine_of: EngineOf, http_of: HttpOf) -> None:
    engine = engine_of(schedulers=["scheduler-0", "scheduler-1"])
    async with serving(engine) as served:
        for number, peer in enumerate(engine.schedulers, start=1):
            load = Load(queued=number, running=3, pages_total=64, pages_free=8, pages_cached=24 * number, page_size=16)
            engine.deliver([Delivery(peer, Heartbeat(phase=Phase.STEP, load=load))])
        engine.deliver([Delivery("scheduler-2", PeerUp("scheduler-2", Role.SCHEDULER, "1"))])
        found = await gauges(http_of(served))
    for name, value in {
        "vllm:num_requests_waiting": 3,
        "vllm:num_requests_running": 6,
        "vllm:kv_cache_usage_perc": (32 + 8) / 128,
        "sglang:num_queue_reqs": 3,
        "sglang:num_running_reqs": 6,
        "sglang:token_usage": (32 + 8) / 128,
        "sglang:page_size": 16,
        "sglang:num_pages": 128,
        "sglang:max_total_num_tokens": 2048,
    }.items():
        assert found[name] == Sample(value, {"model_name": "tiny"}), name
    sizes = {"block_size": "16", "num_gpu_blocks": "128"}
    assert found["vllm:cache_config_info"] == Sample(1, {"model_name": "tiny", **sizes})
    sizes = {"page_size": "16", "num_pages": "128"}
    assert found["sglang:cache_config_info"] == Sample(1, {"model_name": "tiny", **sizes})
    assert found["vllm:lora_requests_info"].labels["max_lora"] == "0"


async def test_adapters_that_are_ready_are_listed(adapting: EngineOf, http_of: HttpOf) -> None:
    async with serving(adapting(), config=ServingConfig(lora=("haiku=/haiku", "sonnet=/sonnet"))) as served:
        async with asyncio.timeout(10):
            while served.manager.adapters.pending:  # noqa: ASYNC110 - loading sends no event
                await asyncio.sleep(0.001)
        loaded = (await gauges(http_of(served)))["vllm:lora_requests_info"]
    adapters = {"max_lora": "4", "running_lora_adapters": "haiku,sonnet", "waiting_lora_adapters": ""}
    assert loaded.labels == {"model_name": "tiny", **adapters}
    assert 0 <= time.time() - loaded.value < 10


async def test_adapters_that_are_being_loaded_wait(adapting: EngineOf, http_of: HttpOf) -> None:
    async with serving(adapting()) as served:
        registry = AdapterRegistry(served.manager.models, served.manager.fleet, served.manager.control, {"ode": "/ode"})
        served.manager.adapters = registry  # not ticked yet
        waiting = (await gauges(http_of(served)))["vllm:lora_requests_info"]
    adapters = {"max_lora": "4", "running_lora_adapters": "", "waiting_lora_adapters": "ode"}
    assert waiting.labels == {"model_name": "tiny", **adapters}


async def test_a_server_without_schedulers_has_no_samples(engine_of: EngineOf, http_of: HttpOf) -> None:
    engine = engine_of(schedulers=["scheduler-0"])
    async with serving(engine) as served:
        engine.down("scheduler-0")
        text = (await http_of(served).get("/metrics")).text
    families = {each.name: each for each in text_string_to_metric_families(text)}
    assert families["vllm:num_requests_waiting"].samples == []
