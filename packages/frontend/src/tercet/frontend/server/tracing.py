"""OpenTelemetry traces of a frontend (`--otlp-endpoint`): the span of each HTTP request, and their export."""

from urllib.parse import urlsplit

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import SpanKind, StatusCode, Tracer, format_trace_id, use_span
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tercet.frontend.__about__ import __version__
from tercet.frontend.api.metrics import METRICS_PATH
from tercet.frontend.http.error_format import ROUTE
from tercet.frontend.http.trace_context import set_current_trace
from tercet.frontend.manager.request_trace import RequestTracer
from tercet.frontend.server.middleware import OPEN_ROUTES

_UNTRACED = OPEN_ROUTES | {METRICS_PATH}
_TRACES_PATH = "/v1/traces"
_CONTEXT_HEADERS = ("traceparent", "tracestate")


class Tracing:
    """Traces of one frontend: `wrap` its application, and call `on_end` for each request that ends."""

    def __init__(self, endpoint: str, peer: str) -> None:
        self._provider = tracer_provider(endpoint, peer)
        self._tracer = self._provider.get_tracer("tercet.frontend", __version__)
        self.on_end = RequestTracer(self._tracer).on_end

    def wrap(self, app: ASGIApp) -> ASGIApp:
        return TracingMiddleware(app, self._tracer)

    def close(self) -> None:
        """Send the remaining spans. It may wait for the collector."""
        self._provider.shutdown()


def tracer_provider(endpoint: str, peer: str) -> TracerProvider:
    """Return a provider that sends spans to an OTLP collector over HTTP.

    An endpoint without a path gets the standard one. The SDK's environment variables (OTEL_SERVICE_NAME,
    OTEL_TRACES_SAMPLER, OTEL_EXPORTER_OTLP_HEADERS, ...) hold.
    """
    url = endpoint if urlsplit(endpoint).path.strip("/") else endpoint.rstrip("/") + _TRACES_PATH
    own = {"service.name": "tercet", "service.version": __version__, "service.instance.id": peer}
    provider = TracerProvider(resource=Resource(own).merge(OTELResourceDetector().detect()))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=url)))
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
                self._propagator.inject(own)
                response_headers = MutableHeaders(scope=message)
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
