"""OpenTelemetry spans of requests, made when a request ends, from the times that its state keeps.

    tokenize                      from the arrival to the first dispatch
    generate | embed              one prompt, until its last token
      wait                        no scheduler or detokenizer takes it
      dispatch | redispatch       one attempt, until it is lost or ends
        queue                     in the scheduler's queue
        prefill                   until the first token, or the vector
          chunk                   one step
        detokenize                the batch with the first token, in the detokenizer
        decode                    from the first token to the last

The parent is the span of the HTTP request. Names of attributes are OpenTelemetry's for generative AI where it has some.
"""

from collections.abc import Mapping, Sequence

from opentelemetry import trace
from opentelemetry.trace import Span, StatusCode, Tracer
from opentelemetry.util.types import AttributeValue

from tercet.frontend.http.loop_turns import LoopTurns, Steps
from tercet.frontend.manager.req_state import ReqState
from tercet.frontend.manager.request_reports import EndedRequest
from tercet.frontend.manager.request_table import outcome_of
from tercet.frontend.routing.request_state import Dispatch, RequestState

_NS = 1_000_000_000

Attributes = Mapping[str, AttributeValue]


class RequestTracer:
    """Maker of the spans of requests whose HTTP span is sampled."""

    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer

    async def report(self, ended: EndedRequest, turns: LoopTurns) -> None:
        """Make the spans of a request that ended, below the current span."""
        parent = trace.get_current_span()
        if parent.get_span_context().trace_flags.sampled:
            await turns.run(ended.owner, self._add_spans(parent, ended))

    def _add_spans(self, parent: Span, ended: EndedRequest) -> Steps[None]:
        spans = _Spans(self._tracer, round((ended.unix_time - ended.ended_at) * _NS))
        spans.add(parent, "tokenize", ended.admitted_at, ended.states[0].started_at)
        for state in ended.states:
            yield from _add_request(spans, parent, state, ended.ended_at)


class _Spans:
    """Adds spans with times of the request table's clock; `origin` is that clock's zero, in nanoseconds."""

    def __init__(self, tracer: Tracer, origin: int) -> None:
        self._tracer = tracer
        self._origin = origin

    def start(self, parent: Span, name: str, at: float, attributes: Attributes | None = None) -> Span:
        context = trace.set_span_in_context(parent)
        return self._tracer.start_span(name, context, attributes=attributes, start_time=self._ns(at))

    def end(self, span: Span, at: float) -> None:
        span.end(self._ns(at))

    def add(self, parent: Span, name: str, start: float, end: float, attributes: Attributes | None = None) -> None:
        self.end(self.start(parent, name, start, attributes), max(start, end))

    def add_wait(self, parent: Span, start: float, end: float) -> None:
        """Add the time without a scheduler, if there was such a time."""
        if end > start:
            self.add(parent, "wait", start, end)

    def _ns(self, at: float) -> int:
        return self._origin + round(at * _NS)


def _add_request(spans: _Spans, parent: Span, state: RequestState, now: float) -> Steps[None]:
    end = now if state.ended_at is None else state.ended_at
    kind = "generate" if state.has_text else "embed"
    attributes: dict[str, AttributeValue] = {
        "gen_ai.request.model": state.model.name,
        "gen_ai.response.id": state.rid,
        "gen_ai.usage.input_tokens": state.prompt_tokens,
        "tercet.outcome": outcome_of(state).value,
    }
    if isinstance(state, ReqState):
        attributes["gen_ai.usage.output_tokens"] = state.output_tokens
        attributes["tercet.cached_tokens"] = state.cached_tokens
        finishes = [each.finish.type.value for each in state.choices if each.finish]
        attributes["gen_ai.response.finish_reasons"] = finishes
    span = spans.start(parent, kind, state.started_at, attributes)
    if state.error is not None:
        span.set_status(StatusCode.ERROR, str(state.error))
    ends = [each.at for each in state.dispatches[1:]] + [end]
    if state.dispatches:
        spans.add_wait(span, state.started_at, state.dispatches[0].at)
    for attempt, (dispatch, until) in enumerate(zip(state.dispatches, ends, strict=False)):
        yield from _add_dispatch(spans, span, dispatch, attempt, until, state.dispatches[attempt + 1 : attempt + 2])
    spans.end(span, end)


def _add_dispatch(
    spans: _Spans, parent: Span, dispatch: Dispatch, attempt: int, until: float, following: Sequence[Dispatch]
) -> Steps[None]:
    attributes: dict[str, AttributeValue] = {
        "tercet.attempt": attempt,
        "tercet.scheduler": dispatch.scheduler,
        "tercet.detokenizer": dispatch.detokenizer,
    }
    if dispatch.cause:
        attributes["tercet.redispatch.cause"] = dispatch.cause
    span = spans.start(parent, "redispatch" if attempt else "dispatch", dispatch.at, attributes)
    lost = until
    for each in following:
        lost = until if dispatch.lost_at is None else dispatch.lost_at
        if each.cause:
            span.set_status(StatusCode.ERROR, each.cause)
        spans.add_wait(parent, lost, until)
    yield from _add_stages(spans, span, dispatch, lost)
    spans.end(span, lost)


def _add_stages(spans: _Spans, parent: Span, dispatch: Dispatch, until: float) -> Steps[None]:
    """Add the stages of an attempt, as far as its output says when they were."""
    if dispatch.queue_time is None or dispatch.first_output_at is None:
        return
    computed = dispatch.first_output_at - dispatch.detokenize_seconds
    began = min(dispatch.at + dispatch.queue_time, computed)
    spans.add(parent, "queue", dispatch.at, began)
    prefill = spans.start(parent, "prefill", began)
    starts = [min(dispatch.at + chunk.at, computed) for chunk in dispatch.chunks]
    for chunk, start, end in zip(dispatch.chunks, starts, [*starts[1:], computed], strict=False):
        spans.add(prefill, "chunk", start, end, {"tercet.tokens": chunk.tokens})
        yield
    spans.end(prefill, computed)
    if dispatch.chunks:
        spans.add(parent, "detokenize", computed, dispatch.first_output_at)
    if until > dispatch.first_output_at:
        spans.add(parent, "decode", dispatch.first_output_at, until)
    yield
