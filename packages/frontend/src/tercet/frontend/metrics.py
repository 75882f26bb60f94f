"""/metrics for Prometheus, made of the last heartbeats and of counters when it is asked for."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from starlette.requests import Request
from starlette.responses import Response

from tercet.frontend.counters import Cause, Outcome
from tercet.frontend.measures import Histogram
from tercet.frontend.tokenizer_manager import TokenizerManager
from tercet.protocol.values import FinishType, Role

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
_STEPS = {
    "steps": "Forward passes.",
    "step_seconds": "What they took, all together, in seconds.",
}
"""Of its heartbeat, likewise."""
_FIELDS = {"pages": "pages_total", "slots": "slots_total"}
"""Fields of the load that are named otherwise: in Prometheus' names _total is for counters."""
_HISTOGRAMS = {
    "queue_seconds": ("queue", "From a request's arrival at a scheduler to the first step that has it."),
    "time_to_first_token_seconds": ("first_token", "From a tokenized prompt to its first token."),
    "inter_token_seconds": ("between_tokens", "From one token of a choice to the next."),
    "request_seconds": ("request", "From a tokenized prompt to its whole answer."),
    "request_prompt_tokens": ("prompt_tokens", "Length of the prompts that were answered."),
    "request_output_tokens": ("output_tokens", "Length of their answers, all choices together."),
}
"""By name: the field of a model's `Measures`."""

Kind = type[GaugeMetricFamily] | type[CounterMetricFamily]
Samples = Iterable[tuple[Sequence[str], float]]
"""What the labels say, and the value."""


class Metrics:
    """The route. Names begin with `tercet_`; values of schedulers are the same from every frontend.

    What a frontend counts itself bears its name: those that share a socket answer in turn, and one series of several
    processes would go back and forth.
    """

    def __init__(self, manager: TokenizerManager) -> None:
        self._manager = manager

    async def scrape(self, request: Request) -> Response:
        """Everything, in the format that the reader prefers."""
        encode, media_type = choose_encoder(request.headers.get("accept", ""))
        return Response(encode(self), headers={"content-type": media_type})

    def collect(self) -> Iterator[Metric]:
        """Every family."""
        yield from self._of_schedulers()
        yield from self._of_requests()
        yield from self._of_models()
        yield from self._of_parts()

    def _of_schedulers(self) -> Iterator[Metric]:
        schedulers = [
            ([each.peer, self._manager.models.name_of(each)], each) for each in self._manager.fleet.schedulers.values()
        ]
        kinds: list[tuple[Kind, Mapping[str, str]]] = [(GaugeMetricFamily, _GAUGES), (CounterMetricFamily, _COUNTERS)]
        for kind, texts in kinds:
            for name, text in texts.items():
                field = _FIELDS.get(name, name)
                samples = [(labels, getattr(each.load, field)) for labels, each in schedulers]
                yield _metric(kind, name, text, ["scheduler", "model"], samples)
        for name, text in _STEPS.items():
            samples = [(labels, getattr(each.heartbeat, name)) for labels, each in schedulers]
            yield _metric(CounterMetricFamily, name, text, ["scheduler", "model"], samples)

    def _of_requests(self) -> Iterator[Metric]:
        manager, counters = self._manager, self._manager.counters
        yield self._gauge("requests_open", "Requests not done with.", [((), manager.running)])
        yield self._gauge("requests_waiting", "Requests that no part takes.", [((), manager.waiting)])
        outcomes = [([each.value], counters.outcomes[each]) for each in Outcome]
        yield self._counter("requests", "Requests that ended, by how they did.", outcomes, "outcome")
        text = "Requests turned away because their API key had too many in flight."
        yield self._counter("requests_over_limit", text, [((), counters.over_limit)])
        causes = [([each.value], counters.redispatches[each]) for each in Cause]
        yield self._counter("redispatches", "Requests dispatched again, by why.", causes, "cause")
        text = "Requests that were dispatched again, and finished."
        yield self._counter("requests_resumed_finished", text, [((), counters.resumed_finished)])
        text = "HTTP requests whose answer has begun, by the router's own paths."
        exchanges = [((each.method, each.route, str(each.status)), times) for each, times in counters.exchanges.items()]
        yield self._counter("http_responses", text, exchanges, "method", "route", "status")

    def _of_models(self) -> Iterator[Metric]:
        models = self._manager.counters.models
        for name, (field, text) in _HISTOGRAMS.items():
            metric = HistogramMetricFamily(f"tercet_{name}", text, labels=["frontend", "model"])
            for model, measures in models.items():
                histogram: Histogram = getattr(measures, field)
                metric.add_metric([self._manager.peer, model], _cumulative(histogram), histogram.sum)
            yield metric
        finishes = [
            ((model, reason.value), measures.finishes[reason])
            for model, measures in models.items()
            for reason in (FinishType.STOP, FinishType.LENGTH)
        ]
        text = "Choices that were answered, by why they ended."
        yield self._counter("choices_finished", text, finishes, "model", "reason")

    def _of_parts(self) -> Iterator[Metric]:
        fleet, deaths = self._manager.fleet, self._manager.counters.deaths
        ready = [
            ([Role.SCHEDULER.value], sum(each.ready for each in fleet.schedulers.values())),
            ([Role.DETOKENIZER.value], sum(each.ready for each in fleet.detokenizers.values())),
        ]
        yield self._gauge("parts_ready", "Parts that take requests now.", ready, "role")
        dead = [([role.value], deaths[role]) for role in (Role.SCHEDULER, Role.DETOKENIZER)]
        text = "Parts lost that had not said that they leave."
        yield self._counter("part_deaths", text, dead, "role")

    def _gauge(self, name: str, text: str, samples: Samples, *labels: str) -> Metric:
        return _metric(GaugeMetricFamily, name, text, ["frontend", *labels], self._own(samples))

    def _counter(self, name: str, text: str, samples: Samples, *labels: str) -> Metric:
        return _metric(CounterMetricFamily, name, text, ["frontend", *labels], self._own(samples))

    def _own(self, samples: Samples) -> Samples:
        return [((self._manager.peer, *values), number) for values, number in samples]


def _metric(kind: Kind, name: str, text: str, labels: Sequence[str], samples: Samples) -> Metric:
    metric = kind(f"tercet_{name}", text, labels=labels)
    for values, number in samples:
        metric.add_metric(values, number)
    return metric


def _cumulative(histogram: Histogram) -> list[tuple[str, float]]:
    bounds = [*map(str, histogram.bounds), "+Inf"]
    return list(zip(bounds, accumulate(histogram.buckets), strict=True))
