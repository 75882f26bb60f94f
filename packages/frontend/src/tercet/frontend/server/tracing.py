"""OpenTelemetry traces of a frontend (`--otlp-endpoint`): the span of each HTTP request, and their export."""

import logging
import threading
from collections.abc import Sequence
from urllib.parse import urlsplit

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExportResult
from opentelemetry.trace import SpanKind, StatusCode, Tracer, format_trace_id, use_span
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tercet.frontend.__about__ import __version__
from tercet.frontend.api.metrics import METRICS_PATH
from tercet.frontend.http.error_format import ROUTE
from tercet.frontend.http.trace_context import set_current_trace
from tercet.frontend.manager.counters import TelemetryFailures
from tercet.frontend.manager.request_trace import RequestTracer
from tercet.frontend.server.middleware import OPEN_ROUTES

_UNTRACED = OPEN_ROUTES | {METRICS_PATH}
_TRACES_PATH = "/v1/traces"
_CONTEXT_HEADERS = ("traceparent", "tracestate")
_CLOSE_SECONDS = 5.0
"""Seconds in which the last spans are sent again if the collector does not take them."""
_exporter_logger = logging.getLogger(OTLPSpanExporter.__module__)


class Tracing:
    """Traces of one frontend: `wrap` its application, and call `report` for each request that ended."""

    def __init__(self, endpoint: str, peer: str, failures: TelemetryFailures) -> None:
        self._exporter = SpanExporter(endpoint, failures)
        _exporter_logger.addFilter(self._exporter.keep_reason)
        self._provider = tracer_provider(self._exporter, peer)
        self._tracer = self._provider.get_tracer("tercet.frontend", __version__)
        self.report = RequestTracer(self._tracer).report

    def wrap(self, app: ASGIApp) -> ASGIApp:
        return TracingMiddleware(app, self._tracer)

    def close(self) -> None:
        """Send the remaining spans. Retries end after a few seconds."""
        timer = threading.Timer(_CLOSE_SECONDS, self._exporter.shutdown)
        timer.start()
        self._provider.shutdown()
        timer.cancel()
        _exporter_logger.removeFilter(self._exporter.keep_reason)


class SpanExporter:
    """OTLP exporter whose failures are counted. An endpoint without a path gets the standard one."""

    def __init__(self, endpoint: str, failures: TelemetryFailures) -> None:
        address = urlsplit(endpoint if urlsplit(endpoint).path.strip("/") else endpoint.rstrip("/") + _TRACES_PATH)
        self._failures = failures
        self._exporter = OTLPSpanExporter(endpoint=address.geturl())
        self._logged_url = address._replace(netloc=address.netloc.rpartition("@")[2]).geturl()
        """The address without a user and password."""
        self._reason = ""
        """First line that the SDK logged about the current batch; it logs each retry."""
        self._closed = False

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self._reason = ""
        result = self._exporter.export(spans)
        if result is not SpanExportResult.SUCCESS:
            self._failures.add(
                f"traces: spans were not sent, check the collector: url={self._logged_url} spans={len(spans)} "
                f"reason={self._reason}"
            )
        return result

    def shutdown(self) -> None:
        """End retries. Idempotent."""
        if not self._closed:
            self._closed = True
            self._exporter.shutdown()

    def keep_reason(self, record: logging.LogRecord) -> bool:
        """Filter of the SDK's log lines: keep the first one as the reason, and show none."""
        self._reason = self._reason or record.getMessage()
        return False


def tracer_provider(exporter: SpanExporter, peer: str) -> TracerProvider:
    """Return a provider of spans. The SDK's environment variables hold: OTEL_SERVICE_NAME, OTEL_TRACES_SAMPLER, ..."""
    own = {"service.name": "tercet", "service.version": __version__, "service.instance.id": peer}
    provider = TracerProvider(resource=Resource(own).merge(OTELResourceDetector().detect()))
    provider.add_span_processor(BatchSpanProcessor(exporter))
    return provider


class TracingMiddleware:
    """ASGI middleware outside all others: a span for each request, in the client's trace if it sent one.

    The response names the span in `traceparent`.
    """

    def __init__(self, app: ASGIApp, tracer: Tracer) -> None:
        self.app = app
        self._tracer = tracer
        self._propagator = TraceContextTextMapPropagator()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in _UNTRACED:
            await self.app(scope, receive, send)
            return
        headers, method = Headers(scope=scope), scope["method"]
        parent = self._propagator.extract({name: headers[name] for name in _CONTEXT_HEADERS if name in headers})
        attributes = {"http.request.method": method, "url.path": scope["path"]}
        span = self._tracer.start_span(method, parent, SpanKind.SERVER, attributes)
        context = span.get_span_context()

        async def send_traced(message: Message) -> None:
            if message["type"] == "http.response.start":
                own: dict[str, str] = {}
                self._propagator.inject(own)  # nothing if the SDK is disabled
                response_headers = MutableHeaders(scope=message)
                if "traceparent" in own:
                    response_headers["traceparent"] = own["traceparent"]
                span.set_attribute("tercet.request_id", response_headers.get("x-request-id", ""))
                span.set_attribute("http.response.status_code", message["status"])
                if route := scope.get(ROUTE):
                    span.update_name(f"{method} {route}")
                    span.set_attribute("http.route", route)
                if message["status"] >= 500:
                    span.set_status(StatusCode.ERROR)
            await send(message)

        with use_span(span, end_on_exit=True):
            set_current_trace(format_trace_id(context.trace_id) if context.trace_flags.sampled else "")
            await self.app(scope, receive, send_traced)
