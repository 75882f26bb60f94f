"""Trace of the current HTTP request, for the parts of a frontend that know nothing of OpenTelemetry."""

from contextvars import ContextVar

_current: ContextVar[str] = ContextVar("trace id", default="")


def set_current_trace(trace_id: str) -> None:
    """Store the trace id of the current task's request, in hex; empty if it is not sampled."""
    _current.set(trace_id)


def current_trace_id() -> str:
    """Return the trace id of the request that started the current task; empty if no trace is recorded."""
    return _current.get()
