"""Traces of requests, as a collector receives them by OTLP."""

import asyncio
import contextlib
import logging
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import httpx2
import pytest

pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="traces are an optional extra")

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from prometheus_client.openmetrics import parser
from starlette.types import ASGIApp

from tercet.frontend.config.config import TelemetryOptions
from tercet.frontend.manager.counters import TelemetryFailures
from tercet.frontend.manager.request_table import RequestTable
from tercet.frontend.server.tracing import SpanExporter, Tracing
from tercet.frontend.testing import EncodingEngine, FakeEngine, Served, serving
from tercet.protocol.messages.values import ModelLimits, Task

EngineOf = Callable[..., FakeEngine]
HttpOf = Callable[[Served], httpx2.AsyncClient]
ASK: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 8}
TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
OPENMETRICS = {"accept": "application/openmetrics-text"}


class Collector:
    """OTLP receiver."""

    def __init__(self) -> None:
        self.spans: list[Any] = []
        self.resource: dict[str, str] = {}
        self.paths: set[str] = set()
        self.url = ""
        self.status = 200

    def receive(self, path: str, body: bytes) -> None:
        self.paths.add(path)
        for group in ExportTraceServiceRequest.FromString(body).resource_spans:
            self.resource |= {each.key: each.value.string_value for each in group.resource.attributes}
            self.spans += [span for scope in group.scope_spans for span in scope.spans]

    def tree(self, parent: bytes = b"") -> list[Any]:
        """Return names and children of spans, ordered by start."""
        children = sorted((each for each in self.spans if each.parent_span_id == parent), key=_start)
        return [(each.name, below) if (below := self.tree(each.span_id)) else each.name for each in children]

    def named(self, name: str) -> list[Any]:
        return sorted((each for each in self.spans if each.name == name), key=_start)


def _start(span: Any) -> int:
    return int(span.start_time_unix_nano)


def attributes(span: Any) -> dict[str, Any]:
    return {each.key: getattr(each.value, each.value.WhichOneof("value")) for each in span.attributes}


@pytest.fixture
def collector() -> Iterator[Collector]:
    found = Collector()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            found.receive(self.path, self.rfile.read(int(self.headers["content-length"])))
            self.send_response(found.status)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        found.url = f"http://127.0.0.1:{server.server_port}"
        yield found
        server.shutdown()
        thread.join()


@contextlib.asynccontextmanager
async def traced(
    engine: FakeEngine, collector: Collector, failures: TelemetryFailures | None = None
) -> AsyncIterator[Served]:
    """Serve with traces; at the end the collector has all of them."""
    tracing = Tracing(collector.url, "frontend-0", failures or TelemetryFailures())

    def wrap(app: ASGIApp, requests: RequestTable) -> ASGIApp:
        requests.reports.add(tracing.report)
        return tracing.wrap(app)

    try:
        async with serving(engine, wrap=wrap) as served:
            yield served
    finally:
        await asyncio.to_thread(tracing.close)


async def until_running(engine: FakeEngine) -> None:
    async with asyncio.timeout(10):
        while not engine.running:  # noqa: ASYNC110 - the engine has no event for it
            await asyncio.sleep(0.001)


STAGES = ["queue", ("prefill", ["chunk", "chunk"]), "detokenize", "decode"]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_is_one_trace(engine_of: EngineOf, http_of: HttpOf, collector: Collector, stream: bool) -> None:
    async with traced(engine_of(), collector) as served:
        response = await http_of(served).post("/v1/chat/completions", json=ASK | {"stream": stream})
        await http_of(served).get("/health")
    assert collector.tree() == [
        ("POST /v1/chat/completions", ["tokenize", ("generate", [("dispatch", STAGES)])]),
    ]
    assert collector.paths == {"/v1/traces"}
    assert collector.resource.items() >= {"service.name": "tercet", "service.instance.id": "frontend-0"}.items()
    [root], [generate], [dispatch] = map(collector.named, ("POST /v1/chat/completions", "generate", "dispatch"))
    assert response.headers["traceparent"].split("-")[:3] == ["00", root.trace_id.hex(), root.span_id.hex()]
    assert (
        attributes(root).items()
        >= {
            "http.response.status_code": 200,
            "http.route": "/v1/chat/completions",
            "tercet.request_id": response.headers["x-request-id"],
        }.items()
    )
    assert (
        attributes(generate).items()
        >= {
            "gen_ai.request.model": "tiny",
            "gen_ai.usage.output_tokens": 4,
            "tercet.outcome": "finished",
        }.items()
    )
    assert attributes(dispatch).items() >= {"tercet.scheduler": "scheduler-0", "tercet.attempt": 0}.items()
    for outer, inner in ((root, generate), (generate, dispatch), (dispatch, collector.named("decode")[0])):
        assert outer.start_time_unix_nano <= inner.start_time_unix_nano <= inner.end_time_unix_nano
        assert inner.end_time_unix_nano <= outer.end_time_unix_nano


async def test_a_redispatch_after_a_death_is_a_span(engine_of: EngineOf, http_of: HttpOf, collector: Collector) -> None:
    engine = engine_of(auto=False, schedulers=["scheduler-0", "scheduler-1"])
    async with traced(engine, collector) as served:
        asked = asyncio.create_task(http_of(served).post("/v1/chat/completions", json=ASK))
        await until_running(engine)
        engine.step()
        engine.down("scheduler-0")
        while not asked.done():
            engine.step()
            await asyncio.sleep(0.001)
        assert (await asked).status_code == 200
    [first], [second] = collector.named("dispatch"), collector.named("redispatch")
    assert (first.status.code, first.status.message) == (2, "scheduler_died")
    assert second.status.code == 0
    assert (
        attributes(second).items()
        >= {
            "tercet.attempt": 1,
            "tercet.scheduler": "scheduler-1",
            "tercet.redispatch.cause": "scheduler_died",
        }.items()
    )
    assert first.end_time_unix_nano == second.start_time_unix_nano
    assert [len(collector.tree(each.span_id)) for each in (first, second)] == [4, 4]
    assert collector.named("wait") == []


async def test_the_wait_for_another_scheduler_is_a_span(
    engine_of: EngineOf, http_of: HttpOf, collector: Collector
) -> None:
    engine = engine_of(auto=False)
    async with traced(engine, collector) as served:
        asked = asyncio.create_task(http_of(served).post("/v1/chat/completions", json=ASK))
        await until_running(engine)
        engine.down("scheduler-0")
        await asyncio.sleep(0.01)
        engine.scheduler_up("scheduler-1")
        while not asked.done():
            engine.step()
            await asyncio.sleep(0.001)
    assert collector.tree() == [
        (
            "POST /v1/chat/completions",
            ["tokenize", ("generate", ["dispatch", "wait", ("redispatch", STAGES)])],
        )
    ]
    [wait] = collector.named("wait")
    assert wait.end_time_unix_nano - wait.start_time_unix_nano >= 10_000_000
    assert wait.end_time_unix_nano == collector.named("redispatch")[0].start_time_unix_nano


@pytest.mark.parametrize(("flags", "sampled"), [("01", True), ("00", False)])
async def test_a_clients_trace_is_continued(
    engine_of: EngineOf, http_of: HttpOf, collector: Collector, flags: str, sampled: bool
) -> None:
    headers = {"traceparent": f"00-{TRACE}-{SPAN}-{flags}", "tracestate": "vendor=1"}
    async with traced(engine_of(), collector) as served:
        http = http_of(served)
        response = await http.post("/v1/chat/completions", json=ASK, headers=headers)
        scraped = (await http.get("/metrics", headers=OPENMETRICS)).text
        text = (await http.get("/metrics")).text
    assert response.headers["traceparent"].split("-")[1] == TRACE
    assert response.headers["traceparent"].endswith(f"-{flags}")
    assert len(collector.spans) == (10 if sampled else 0)
    if sampled:
        [root] = collector.named("POST /v1/chat/completions")
        assert (root.trace_id.hex(), root.parent_span_id.hex(), root.trace_state) == (TRACE, SPAN, "vendor=1")
    families = {each.name: each for each in parser.text_string_to_metric_families(scraped)}  # type: ignore[no-untyped-call]
    for name in ("queue", "time_to_first_token", "request"):
        exemplars = [each.exemplar for each in families[f"tercet_{name}_seconds"].samples if each.exemplar]
        assert [each.labels for each in exemplars] == [{"trace_id": TRACE}] * sampled
    assert TRACE not in text


async def test_a_refused_request_has_a_span_with_its_status(
    engine_of: EngineOf, http_of: HttpOf, collector: Collector
) -> None:
    async with traced(engine_of(), collector) as served:
        response = await http_of(served).post("/v1/chat/completions", json=ASK | {"temperature": 9})
    assert response.status_code == 400
    [span] = collector.spans
    assert attributes(span)["http.response.status_code"] == 400


async def test_an_embedding_is_a_trace(files: dict[str, bytes], http_of: HttpOf, collector: Collector) -> None:
    limits = ModelLimits(model="tiny", context_length=64, vocab_size=512, max_total_tokens=64, task=Task.EMBED, width=4)
    engine = EncodingEngine(lambda *_: [], files, limits)
    async with traced(engine, collector) as served:
        response = await http_of(served).post("/v1/embeddings", json={"model": "tiny", "input": ["a", "b"]})
    assert response.status_code == 200
    embed = ("embed", [("dispatch", ["queue", "prefill"])])
    assert collector.tree() == [("POST /v1/embeddings", ["tokenize", embed, embed])]


async def test_a_collector_that_fails_harms_no_request(
    engine_of: EngineOf, http_of: HttpOf, collector: Collector, caplog: pytest.LogCaptureFixture
) -> None:
    failures = TelemetryFailures()
    collector.status = 400
    async with traced(engine_of(), collector, failures) as served:
        for _ in range(2):
            assert (await http_of(served).post("/v1/chat/completions", json=ASK)).status_code == 200
    assert failures.total == 1
    [line] = [each.getMessage() for each in caplog.records if each.levelno >= logging.WARNING]
    assert line.startswith(f"traces: spans were not sent, check the collector: url={collector.url}/v1/traces spans=20 ")
    assert "reason=Failed to export spans batch code: 400" in line


async def test_a_disabled_sdk_harms_no_request(
    engine_of: EngineOf, http_of: HttpOf, collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_SDK_DISABLED", "true")
    async with traced(engine_of(), collector) as served:
        response = await http_of(served).post("/v1/chat/completions", json=ASK)
    assert response.status_code == 200
    assert "traceparent" not in response.headers
    assert collector.spans == []


@pytest.mark.parametrize("options", ["", "otlp_endpoint='http://127.0.0.1:9'"])
def test_the_sdk_is_imported_with_the_option_only(options: str) -> None:
    code = (
        "import sys; from tercet.frontend.config.config import *; from tercet.frontend.wiring import Frontend; "
        "link, http = LinkConfig(insecure_loopback=True), HttpConfig(port=0); "
        f"Frontend(FrontendConfig(link=link, http=http, telemetry=TelemetryOptions({options}))); "
        "print('opentelemetry.sdk' in sys.modules, 'opentelemetry.exporter' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.split() == [str(bool(options))] * 2


@pytest.mark.parametrize("url", ["localhost:4317", "ftp://x", "http://"])
def test_an_endpoint_that_is_no_url_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match="--otlp-endpoint"):
        TelemetryOptions(otlp_endpoint=url)


@pytest.mark.parametrize("user", ["", "name:secret@"])
def test_the_log_shows_the_collector_without_its_password(user: str, caplog: pytest.LogCaptureFixture) -> None:
    exporter = SpanExporter(f"http://{user}127.0.0.1:9", TelemetryFailures())
    exporter._exporter.shutdown()  # the attempt fails at once
    exporter.export([])
    [line] = [each.getMessage() for each in caplog.records if "were not sent" in each.getMessage()]
    assert "url=http://127.0.0.1:9/v1/traces " in line
