"""/metrics in Prometheus' text format, made of the last heartbeats and of counters when it is asked for."""

from collections.abc import Iterable, Iterator, Mapping
from enum import StrEnum
from typing import TypeVar

from starlette.requests import Request
from starlette.responses import Response

from tercet.frontend.counters import Cause, Histogram, Outcome
from tercet.frontend.fleet import SchedulerPeer
from tercet.frontend.tokenizer_manager import TokenizerManager
from tercet.protocol.values import Role

MEDIA_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_GAUGES = {
    "queued": "Choices that wait in a scheduler.",
    "running": "Choices that a scheduler computes.",
    "queued_tokens": "Tokens of the choices that wait.",
    "running_tokens": "Tokens of the choices that run.",
    "pages": "Pages of KV cache.",
    "pages_free": "Pages that hold nothing.",
    "pages_cached": "Pages that only the prefix cache holds.",
    "slots": "Choices that can run at a time.",
    "slots_free": "Choices that could run besides.",
}
_COUNTERS = {
    "prompt_tokens": "Prompt tokens of requests that were taken up.",
    "cached_prompt_tokens": "Prompt tokens found in the prefix cache.",
    "output_tokens": "Tokens sampled.",
    "drafted_tokens": "Tokens that were guessed and checked.",
    "accepted_tokens": "Guessed tokens that were right.",
    "retractions": "Choices that had to give up their pages to others.",
}
"""Of a scheduler's load. Its counts begin anew when it does, as Prometheus expects."""
_FIELDS = {"pages": "pages_total", "slots": "slots_total"}
"""Fields of the load that are named otherwise: in Prometheus' names _total is for counters."""


_Member = TypeVar("_Member", bound=StrEnum)


class Metrics:
    """The route. Names begin with `tercet_`; values of schedulers are the same from every frontend.

    What a frontend counts itself bears its name: those that share a socket answer in turn, and one series of several
    processes would go back and forth.
    """

    def __init__(self, manager: TokenizerManager) -> None:
        self._manager = manager
        self._labels = {"frontend": manager.peer}

    async def scrape(self, request: Request) -> Response:  # noqa: ARG002
        """Everything."""
        lines = [*self._of_schedulers(), *self._of_requests(), *self._of_parts()]
        return Response("\n".join(lines) + "\n", media_type=MEDIA_TYPE)

    def _of_schedulers(self) -> Iterator[str]:
        schedulers = list(self._manager.fleet.schedulers.values())
        for name, text in _GAUGES.items():
            yield from _family(f"tercet_{name}", "gauge", text, _by_scheduler(schedulers, name))
        for name, text in _COUNTERS.items():
            yield from _family(f"tercet_{name}_total", "counter", text, _by_scheduler(schedulers, name))

    def _of_requests(self) -> Iterator[str]:
        manager, counters, own = self._manager, self._manager.counters, self._own
        yield from _family("tercet_requests_open", "gauge", "Requests not done with.", own(manager.running))
        yield from _family("tercet_requests_waiting", "gauge", "Requests that no part takes.", own(manager.waiting))
        outcomes = self._own_by("outcome", {each: counters.outcomes[each] for each in Outcome})
        yield from _family("tercet_requests_total", "counter", "Requests that ended, by how they did.", outcomes)
        text = "Requests turned away because their API key had too many in flight."
        yield from _family("tercet_requests_over_limit_total", "counter", text, own(counters.over_limit))
        causes = self._own_by("cause", {each: counters.redispatches[each] for each in Cause})
        yield from _family("tercet_redispatches_total", "counter", "Requests dispatched again, by why.", causes)
        text = "Requests that were dispatched again, and finished."
        yield from _family("tercet_requests_resumed_finished_total", "counter", text, own(counters.resumed_finished))
        text = "From a tokenized prompt to its first token."
        yield from _histogram("tercet_time_to_first_token_seconds", text, self._labels, counters.first_token)

    def _of_parts(self) -> Iterator[str]:
        fleet, deaths = self._manager.fleet, self._manager.counters.deaths
        parts = {
            Role.SCHEDULER: [each.ready for each in fleet.schedulers.values()],
            Role.DETOKENIZER: [each.ready for each in fleet.detokenizers.values()],
        }
        ready = self._own_by("role", {role: sum(each) for role, each in parts.items()})
        yield from _family("tercet_parts_ready", "gauge", "Parts that take requests now.", ready)
        dead = self._own_by("role", {role: deaths[role] for role in parts})
        yield from _family("tercet_part_deaths_total", "counter", "Parts lost that had not said that they leave.", dead)

    def _own(self, value: float) -> list["Sample"]:
        return [(self._labels, value)]

    def _own_by(self, label: str, values: Mapping[_Member, float]) -> list["Sample"]:
        """A sample for each member of an enum."""
        return [({**self._labels, label: each.value}, value) for each, value in values.items()]


Sample = tuple[Mapping[str, str], float]


def _by_scheduler(schedulers: Iterable[SchedulerPeer], name: str) -> list[Sample]:
    field = _FIELDS.get(name, name)
    return [({"scheduler": each.peer}, getattr(each.load, field)) for each in schedulers]


def _family(name: str, kind: str, text: str, samples: Iterable[Sample]) -> Iterator[str]:
    yield f"# HELP {name} {text}"
    yield f"# TYPE {name} {kind}"
    for labels, value in samples:
        yield f"{name}{_labels(labels)} {value}"


def _histogram(name: str, text: str, labels: Mapping[str, str], histogram: Histogram) -> Iterator[str]:
    yield f"# HELP {name} {text}"
    yield f"# TYPE {name} histogram"
    count = 0
    for bound, observed in zip([*histogram.bounds, "+Inf"], histogram.buckets, strict=True):
        count += observed
        yield f"{name}_bucket{_labels({**labels, 'le': str(bound)})} {count}"
    yield f"{name}_sum{_labels(labels)} {histogram.sum}"
    yield f"{name}_count{_labels(labels)} {count}"


def _labels(labels: Mapping[str, str]) -> str:
    """Peer ids hold nothing that would have to be escaped."""
    return "{" + ",".join(f'{name}="{value}"' for name, value in labels.items()) + "}" if labels else ""
