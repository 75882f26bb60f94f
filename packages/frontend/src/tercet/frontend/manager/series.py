"""Prometheus series of a frontend: definitions, collection, validation and merging."""

import re
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from math import inf
from typing import NamedTuple

from prometheus_client import samples
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from tercet.frontend.manager.counters import Counters, Histogram, LatencyMeasures, RequestOutcome
from tercet.frontend.routing.dispatcher import Cause
from tercet.frontend.routing.peers import PeerRegistry
from tercet.protocol.messages.messages import Series
from tercet.protocol.messages.values import FinishType, HistogramSample, Role, Sample

Kind = type[GaugeMetricFamily] | type[CounterMetricFamily]
Values = Iterable[tuple[Sequence[str], float]]
"""Pairs of label values and the sample's value."""
Bucket = tuple[str, float] | tuple[str, float, samples.Exemplar]
"""Bound, cumulative count and exemplar."""

_TRACE_ID = re.compile(r"[0-9a-f]{32}")
_MAX_SAMPLES = 10_000
"""Maximum number of samples of one frontend; the actual number depends on routes, statuses and models."""
_MAX_LABEL_CHARS = 1000
"""Maximum characters of a label value."""


class MetricFamily(NamedTuple):
    """Type, help text and labels of one metric."""

    kind: Kind
    text: str
    labels: tuple[str, ...] = ()
    """Labels besides `frontend`."""


FAMILIES = {
    "requests_open": MetricFamily(GaugeMetricFamily, "Requests in flight."),
    "requests_waiting": MetricFamily(GaugeMetricFamily, "Requests that no scheduler or no detokenizer accepts yet."),
    "requests": MetricFamily(CounterMetricFamily, "Ended requests, by outcome.", ("outcome",)),
    "requests_over_limit": MetricFamily(
        CounterMetricFamily, "Requests rejected because their API key had too many in flight."
    ),
    "redispatches": MetricFamily(CounterMetricFamily, "Requests dispatched again, by cause.", ("cause",)),
    "requests_resumed_finished": MetricFamily(
        CounterMetricFamily, "Requests that finished after they were dispatched again."
    ),
    "http_responses": MetricFamily(
        CounterMetricFamily,
        "HTTP responses that have begun, by route and status.",
        ("method", "route", "status"),
    ),
    "choices_finished": MetricFamily(CounterMetricFamily, "Finished choices, by finish reason.", ("model", "reason")),
    "parts_ready": MetricFamily(GaugeMetricFamily, "Schedulers and detokenizers that accept requests.", ("role",)),
    "part_deaths": MetricFamily(
        CounterMetricFamily, "Schedulers and detokenizers that were lost without announcing that they leave.", ("role",)
    ),
    "telemetry_failures": MetricFamily(
        CounterMetricFamily, "Failed log lines and spans of requests, and failed exports of spans."
    ),
}
_HISTOGRAMS = {
    "queue_seconds": ("queue", "Time from a request's arrival at a scheduler to the first step that includes it."),
    "time_to_first_token_seconds": ("first_token", "Time from the end of tokenization to the first token."),
    "inter_token_seconds": ("between_tokens", "Time from one token of a choice to the next."),
    "request_seconds": ("request", "Time from the end of tokenization to the end of the answer."),
    "request_prompt_tokens": ("prompt_tokens", "Prompt tokens of an answered request."),
    "request_output_tokens": ("output_tokens", "Output tokens of an answered request, all choices together."),
}
"""Metric name to field of `LatencyMeasures` and help text."""
_BOUNDS: dict[str, tuple[float, ...]] = {
    name: getattr(LatencyMeasures(), field).bounds for name, (field, _) in _HISTOGRAMS.items()
}


def _parts_ready(fleet: PeerRegistry) -> Values:
    """Return the parts that accept requests, by role. Schedulers that only encode are counted where there are any."""
    encoders = [each for each in fleet.schedulers.values() if each.encoder is not None]
    schedulers = sum(each.ready for each in fleet.schedulers.values()) - sum(each.ready for each in encoders)
    return [
        ([Role.SCHEDULER.value], schedulers),
        *((["encoder"], sum(each.ready for each in encoders)) for _ in encoders[:1]),
        ([Role.DETOKENIZER.value], sum(each.ready for each in fleet.detokenizers.values())),
    ]


def frontend_series(number: str, counters: Counters, fleet: PeerRegistry, running: int, waiting: int) -> Series:
    """Return this frontend's counters, as the answer to the request with this id."""
    exchanges, models = counters.exchanges.items(), counters.models.items()
    values: dict[str, Values] = {
        "requests_open": [((), running)],
        "requests_waiting": [((), waiting)],
        "requests": [([each.value], counters.outcomes[each]) for each in RequestOutcome],
        "requests_over_limit": [((), counters.over_limit)],
        "redispatches": [([each.value], counters.redispatches[each]) for each in Cause],
        "requests_resumed_finished": [((), counters.resumed_finished)],
        "http_responses": [([each.method, each.route, str(each.status)], times) for each, times in exchanges],
        "choices_finished": [
            ([model, reason.value], measures.finishes[reason])
            for model, measures in models
            for reason in (FinishType.STOP, FinishType.LENGTH)
        ],
        "parts_ready": _parts_ready(fleet),
        "part_deaths": [([role.value], counters.deaths[role]) for role in (Role.SCHEDULER, Role.DETOKENIZER)],
        "telemetry_failures": [((), counters.telemetry_failures.total)],
    }
    return Series(
        id=number,
        samples={name: [Sample(labels=list(labels), value=each) for labels, each in values[name]] for name in FAMILIES},
        histograms={
            name: [_sample(model, getattr(measures, field)) for model, measures in models]
            for name, (field, _) in _HISTOGRAMS.items()
        },
    )


def _sample(model: str, histogram: Histogram) -> HistogramSample:
    return HistogramSample(labels=[model], buckets=histogram.buckets, sum=histogram.sum, exemplars=histogram.exemplars)


def check_series(series: Series) -> None:
    """Raise ValueError for series that no frontend sends. Unknown names are ignored: they come from later versions."""
    if sum(map(len, series.samples.values())) + sum(map(len, series.histograms.values())) > _MAX_SAMPLES:
        raise ValueError(f"more than {_MAX_SAMPLES} samples")
    for name, family in FAMILIES.items():
        samples = series.samples.get(name, [])
        _check_labels(name, samples, len(family.labels))
        if not all(0 <= each.value < inf for each in samples):
            raise ValueError(f"{name} is no number of things")
    for name, bounds in _BOUNDS.items():
        histograms = series.histograms.get(name, [])
        _check_labels(name, histograms, 1)
        for each in histograms:
            if len(each.buckets) != len(bounds) + 1 or min(each.buckets) < 0 or not 0 <= each.sum < inf:
                raise ValueError(f"{name} is no histogram of {len(bounds)} bounds")
            _check_exemplars(name, bounds, each)


def _check_exemplars(name: str, bounds: Sequence[float], histogram: HistogramSample) -> None:
    for bucket, each in histogram.exemplars.items():
        belongs = 0 <= each.value < inf and bisect_left(bounds, each.value) == bucket
        if not (belongs and _TRACE_ID.fullmatch(each.trace_id) and 0 <= each.at < inf):
            raise ValueError(f"{name} has an invalid exemplar of bucket {bucket}")


def _check_labels(name: str, samples: Sequence[Sample | HistogramSample], count: int) -> None:
    labels = [tuple(each.labels) for each in samples]
    if any(len(each) != count or any(len(text) > _MAX_LABEL_CHARS for text in each) for each in labels):
        raise ValueError(f"{name} has other labels")
    if len(set(labels)) != len(labels):
        raise ValueError(f"{name} has the same labels twice")


def families_of(frontends: Mapping[str, Series]) -> Iterator[Metric]:
    """Yield every metric with the series of all frontends, labelled with the frontend's name."""
    for name, (kind, text, labels) in FAMILIES.items():
        values = [
            ((frontend, *each.labels), each.value)
            for frontend, series in frontends.items()
            for each in series.samples.get(name, ())
        ]
        yield family_of(kind, name, text, ["frontend", *labels], values)
    for name, (_, text) in _HISTOGRAMS.items():
        metric = HistogramMetricFamily(f"tercet_{name}", text, labels=["frontend", "model"])
        bounds = [*map(str, _BOUNDS[name]), "+Inf"]
        for frontend, series in frontends.items():
            for each in series.histograms.get(name, ()):
                metric.add_metric([frontend, *each.labels], _buckets(bounds, each), each.sum)
        yield metric


def _buckets(bounds: Sequence[str], histogram: HistogramSample) -> list[Bucket]:
    buckets: list[Bucket] = []
    for number, (bound, count) in enumerate(zip(bounds, accumulate(histogram.buckets), strict=True)):
        if (found := histogram.exemplars.get(number)) is None:
            buckets.append((bound, count))
        else:
            buckets.append((bound, count, samples.Exemplar({"trace_id": found.trace_id}, found.value, found.at)))
    return buckets


def family_of(kind: Kind, name: str, text: str, labels: Sequence[str], values: Values) -> Metric:
    """Return one metric, with `tercet_` prefixed to its name."""
    metric = kind(f"tercet_{name}", text, labels=labels)
    for label_values, number in values:
        metric.add_metric(label_values, number)
    return metric
