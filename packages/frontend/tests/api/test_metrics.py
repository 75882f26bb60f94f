"""The /metrics endpoint, parsed line by line."""

import asyncio
import re
import time
from collections.abc import Callable

import httpx2
import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from packages.frontend.tests import encoders
from tercet.frontend.config.config import HttpConfig
from tercet.frontend.manager.counters import Histogram
from tercet.frontend.testing import EncodingEngine, FakeEngine, Served, Token, serving
from tercet.protocol.membership.events import Delivery, PeerUp
from tercet.protocol.messages.messages import Heartbeat, MetricsReq, Series
from tercet.protocol.messages.values import Load, Phase, Role, Sample

EngineOf = Callable[..., FakeEngine]
HttpOf = Callable[[Served], httpx2.AsyncClient]

_NAME = r"((?:tercet_|vllm:|sglang:)\w+)"
_HELP = re.compile(rf"# HELP {_NAME} \S.*")
_TYPE = re.compile(rf"# TYPE {_NAME} (gauge|counter|histogram)")
_SAMPLE = re.compile(rf'{_NAME}((?:\{{\w+="[^"\\\n]*"(?:,\w+="[^"\\\n]*")*\}})?) (-?[0-9.e+-]+)')


def read(text: str) -> dict[str, float]:
    """Return the samples by name with labels. Check that each line is valid and stands under its family's heading."""
    samples: dict[str, float] = {}
    helped = family = kind = ""
    assert text.endswith("\n")
    for line in text.splitlines():
        if match := _HELP.fullmatch(line):
            helped = match[1]
        elif match := _TYPE.fullmatch(line):
            family, kind = match.groups()
            assert family == helped
        else:
            match = _SAMPLE.fullmatch(line)
            assert match, line
            suffixes = ("_bucket", "_sum", "_count") if kind == "histogram" else ("",)
            assert match[1] in {family + suffix for suffix in suffixes}
            assert (kind == "counter") == match[1].endswith("_total")
            assert match[1] + match[2] not in samples
            samples[match[1] + match[2]] = float(match[3])
    return samples


async def scrape(http: httpx2.AsyncClient) -> dict[str, float]:
    answer = await http.get("/metrics")
    assert answer.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    return read(answer.text)


async def test_requests_and_deaths_are_counted(engine_of: EngineOf, http_of: HttpOf) -> None:
    engine = engine_of(schedulers=["scheduler-0", "scheduler-1"])
    async with serving(engine) as served:
        http = http_of(served)
        body = {"model": "tiny", "prompt": "hello"}
        assert (await http.post("/v1/completions", json=body)).status_code == 200
        await served.until_idle()
        engine.down("scheduler-0")
        load = Load(queued=3, running=2, pages_total=64, pages_free=7, pages_cached=50, cached_prompt_tokens=11)
        beat = Heartbeat(phase=Phase.STEP, load=load, steps=8, step_seconds=2.5)
        engine.deliver([Delivery("scheduler-1", beat)])
        samples = await scrape(http)
    assert samples['tercet_requests_total{frontend="frontend-0",outcome="finished"}'] == 1
    assert samples['tercet_requests_total{frontend="frontend-0",outcome="failed"}'] == 0
    assert samples['tercet_part_deaths_total{frontend="frontend-0",role="scheduler"}'] == 1
    assert samples['tercet_parts_ready{frontend="frontend-0",role="scheduler"}'] == 1
    assert samples['tercet_parts_ready{frontend="frontend-0",role="detokenizer"}'] == 1
    who = '{model="tiny",scheduler="scheduler-1"}'
    assert samples[f"tercet_queued{who}"] == 3
    assert samples[f"tercet_steps_total{who}"] == 8
    assert samples[f"tercet_step_seconds_total{who}"] == 2.5
    assert samples[f"tercet_running{who}"] == 2
    assert samples[f"tercet_pages{who}"] == 64
    assert samples[f"tercet_pages_free{who}"] == 7
    assert samples[f"tercet_pages_cached{who}"] == 50
    assert samples[f"tercet_cached_prompt_tokens_total{who}"] == 11
    assert samples['tercet_time_to_first_token_seconds_count{frontend="frontend-0",model="tiny"}'] == 1
    assert 0 < samples['tercet_time_to_first_token_seconds_sum{frontend="frontend-0",model="tiny"}'] < 10


async def test_a_request_that_was_resumed_is_told_of(engine_of: EngineOf, http_of: HttpOf) -> None:
    engine = engine_of(schedulers=["scheduler-0", "scheduler-1"], auto=False)
    async with serving(engine) as served:
        http = http_of(served)
        asked = asyncio.create_task(http.post("/v1/completions", json={"model": "tiny", "prompt": "hello"}))
        async with asyncio.timeout(10):
            while not engine.requests():  # noqa: ASYNC110 - the engine tells nobody
                await asyncio.sleep(0.001)
        engine.step()
        engine.waited = 5.0
        engine.down("scheduler-0")
        for _ in range(10):
            engine.step()
        assert (await asked).json()["choices"][0]["text"] == "Hello world!"
        await served.until_idle()
        info = (await http.get("/server_info")).json()
        samples = await scrape(http)
    assert samples['tercet_redispatches_total{cause="scheduler_died",frontend="frontend-0"}'] == 1
    assert samples['tercet_requests_resumed_finished_total{frontend="frontend-0"}'] == 1
    assert waits(samples) == (1, 0.02), "what it waited at the other says nothing of the queue it had come to"
    assert info["redispatches"] == {"scheduler_died": 1}
    assert info["requests_resumed_and_finished"] == 1
    assert info["requests_ended"] == {"finished": 1}
    assert info["deaths"] == {"scheduler": 1}
    assert info["frontend"] == "frontend-0"


async def test_answers_are_measured_by_model(engine_of: EngineOf, http_of: HttpOf) -> None:
    engine = engine_of(auto=False)
    async with serving(engine) as served:
        body = {"model": "tiny", "prompt": "hello", "n": 2}
        asked = asyncio.create_task(http_of(served).post("/v1/completions", json=body))
        async with asyncio.timeout(10):
            while not engine.requests():  # noqa: ASYNC110 - the engine tells nobody
                await asyncio.sleep(0.001)
        for _ in range(10):
            engine.step()
            await asyncio.sleep(0.004)
        usage = (await asked).json()["usage"]
        samples = await scrape(http_of(served))
    labels = '{frontend="frontend-0",model="tiny"}'
    tokens = usage["completion_tokens"]
    assert tokens > 4
    assert samples[f"tercet_request_seconds_count{labels}"] == 1
    assert samples[f"tercet_request_prompt_tokens_sum{labels}"] == usage["prompt_tokens"]
    assert samples[f"tercet_request_output_tokens_sum{labels}"] == tokens
    assert samples[f"tercet_time_to_first_token_seconds_count{labels}"] == 1
    assert waits(samples) == (1, 0.02), "once for both choices"
    assert samples[f"tercet_inter_token_seconds_count{labels}"] == tokens - 2, "each choice's first came after none"
    between = samples[f"tercet_inter_token_seconds_sum{labels}"] / (tokens - 2)
    assert 0.004 <= between < samples[f"tercet_request_seconds_sum{labels}"]
    assert samples['tercet_choices_finished_total{frontend="frontend-0",model="tiny",reason="stop"}'] == 2
    assert samples['tercet_choices_finished_total{frontend="frontend-0",model="tiny",reason="length"}'] == 0


def waits(samples: dict[str, float], model: str = "tiny") -> tuple[float, float]:
    """Return the number of requests that waited in a queue, and their total wait."""
    labels = f'{{frontend="frontend-0",model="{model}"}}'
    return samples[f"tercet_queue_seconds_count{labels}"], samples[f"tercet_queue_seconds_sum{labels}"]


async def test_a_scheduler_that_says_nothing_of_waits_adds_none(engine_of: EngineOf, http_of: HttpOf) -> None:
    async with serving(engine_of(waited=None)) as served:
        body = {"model": "tiny", "prompt": "hello"}
        assert (await http_of(served).post("/v1/completions", json=body)).status_code == 200
        samples = await scrape(http_of(served))
    assert waits(samples) == (0, 0)
    assert samples['tercet_time_to_first_token_seconds_count{frontend="frontend-0",model="tiny"}'] == 1


@pytest.mark.parametrize(("waited", "told"), [(0.25, (2, 0.5)), (None, (0, 0))])
async def test_inputs_of_encoders_wait_in_queues_too(
    http_of: HttpOf, waited: float | None, told: tuple[float, float]
) -> None:
    def nothing(request: object, index: int) -> list[Token]:
        raise AssertionError("nothing is generated here")

    engine = EncodingEngine(nothing, files=encoders.files(), limits=encoders.limits(), waited=waited)
    async with serving(engine) as served:
        body = {"model": "encoder", "input": ["cat", "dog"]}
        assert (await http_of(served).post("/v1/embeddings", json=body)).status_code == 200
        samples = await scrape(http_of(served))
    assert waits(samples, "encoder") == told
    assert samples['tercet_request_seconds_count{frontend="frontend-0",model="encoder"}'] == 2


async def test_a_scheduler_is_of_no_model_until_it_has_said_of_which(engine_of: EngineOf, http_of: HttpOf) -> None:
    engine = engine_of()
    async with serving(engine, names=("first", "second")) as served:
        engine.deliver([Delivery("scheduler-1", PeerUp("scheduler-1", Role.SCHEDULER, "1"))])
        samples = await scrape(http_of(served))
    assert samples['tercet_queued{model="first",scheduler="scheduler-0"}'] == 0
    assert samples['tercet_queued{model="",scheduler="scheduler-1"}'] == 0


async def test_responses_are_counted_by_route_whatever_clients_ask_for(engine_of: EngineOf, http_of: HttpOf) -> None:
    async with serving(engine_of(), HttpConfig(api_key=("k",))) as served:
        http = http_of(served)
        await http.post("/v1/completions", json={"model": "tiny", "prompt": "hello"})
        http.headers["authorization"] = "Bearer k"
        await http.post("/v1/completions", json={"model": "tiny", "prompt": 7})
        await http.get("/v1/models/org/tiny")
        await http.get("/v1/models/org/small")
        await http.get("/nowhere/1")
        await http.post("/nowhere/2")
        await http.request("PUT", "/v1/completions")
        samples = await scrape(http)
    counted = {name.partition("{")[2]: value for name, value in samples.items() if "http_responses" in name}
    own = 'frontend="frontend-0"'
    assert counted == {
        f'{own},method="other",route="other",status="401"}}': 1,
        f'{own},method="POST",route="/v1/completions",status="400"}}': 1,
        f'{own},method="GET",route="/v1/models/{{model:path}}",status="404"}}': 2,
        f'{own},method="other",route="other",status="404"}}': 2,
        f'{own},method="other",route="other",status="405"}}': 1,
    }


async def test_a_reader_of_openmetrics_gets_it(engine_of: EngineOf, http_of: HttpOf) -> None:
    async with serving(engine_of()) as served:
        wanted = {"accept": "application/openmetrics-text;version=1.0.0,text/plain;q=0.5"}
        answer = await http_of(served).get("/metrics", headers=wanted)
    assert answer.headers["content-type"].startswith("application/openmetrics-text; version=1.0.0")
    families = {family.name: family.type for family in text_string_to_metric_families(answer.text)}  # type: ignore[no-untyped-call]
    assert families["tercet_requests"] == "counter"
    assert families["tercet_request_seconds"] == "histogram"


async def test_what_a_frontend_counts_bears_its_name(engine_of: EngineOf, http_of: HttpOf) -> None:
    """Frontends that share a socket restart their counters separately."""
    async with serving(engine_of()) as served:
        samples = await scrape(http_of(served))
    own = [name for name in samples if name.startswith("tercet_")]
    unnamed = [name for name in own if "scheduler=" not in name and 'frontend="frontend-0"' not in name]
    assert own
    assert not unnamed


def finished(times: int) -> Series:
    return Series(id="", samples={"requests": [Sample(labels=["finished"], value=times)]})


def ended(samples: dict[str, float]) -> dict[str, float]:
    """Return the number of finished requests by frontend."""
    pattern = re.compile(r'tercet_requests_total\{frontend="([^"]+)",outcome="finished"\}')
    return {match[1]: value for name, value in samples.items() if (match := pattern.fullmatch(name))}


async def test_whoever_is_asked_answers_for_all_frontends_at_the_socket(engine_of: EngineOf, http_of: HttpOf) -> None:
    other_frontends = {"frontend-1": finished(3), "frontend-2": finished(4), "frontend-3": finished(-5)}
    engine = engine_of(other_frontends=other_frontends)
    engine.full.add("frontend-2")
    async with serving(engine) as served:
        http = http_of(served)
        assert (await http.post("/v1/completions", json={"model": "tiny", "prompt": "hello"})).status_code == 200
        await served.until_idle()
        samples = await scrape(http)
        engine.full.clear()
        later = await scrape(http)
        engine.deliver([Delivery("frontend-1", MetricsReq(id="theirs"))])
    assert ended(samples) == {"frontend-0": 1, "frontend-1": 3}
    assert ended(later) == {"frontend-0": 1, "frontend-1": 3, "frontend-2": 4}
    assert len([name for name in later if name.startswith("tercet_queued{")]) == 1
    peer, answer = engine.sent[-1]
    assert isinstance(answer, Series)
    assert (peer, answer.id, answer.samples["requests"][0].value) == ("frontend-1", "theirs", 1)


async def test_a_frontend_that_dies_while_it_is_asked_holds_up_nothing(engine_of: EngineOf, http_of: HttpOf) -> None:
    engine = engine_of(other_frontends={"frontend-1": finished(3)}, silent={"frontend-1"})
    async with serving(engine) as served:
        began = time.monotonic()
        asked = asyncio.create_task(scrape(http_of(served)))
        async with asyncio.timeout(10):
            while not any(isinstance(message, MetricsReq) for _, message in engine.sent):  # noqa: ASYNC110
                await asyncio.sleep(0.001)
        engine.down("frontend-1", Role.FRONTEND)
        samples = await asked
    assert time.monotonic() - began < 0.9, "a silent one is waited for a second"
    assert 'tercet_requests_open{frontend="frontend-0"}' in samples
    assert not any("frontend-1" in name for name in samples)


async def test_metrics_ask_for_the_key_unless_told_to_be_open(engine_of: EngineOf, http_of: HttpOf) -> None:
    async with serving(engine_of(), HttpConfig(api_key=("k",))) as served:
        assert (await http_of(served).get("/metrics")).status_code == 401
        key = {"authorization": "Bearer k"}
        assert (await http_of(served).get("/metrics", headers=key)).status_code == 200
    async with serving(engine_of(), HttpConfig(api_key=("k",), open_metrics=True)) as served:
        assert (await http_of(served).get("/metrics")).status_code == 200
        assert (await http_of(served).get("/server_info")).status_code == 401


def test_a_histogram_counts_up_to_and_with_its_bounds() -> None:
    histogram = Histogram((1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 2.5):
        histogram.observe(value)
    histogram.observe(3.0, 2)
    assert (histogram.buckets, histogram.sum) == ([2, 1, 3], 11.5)
