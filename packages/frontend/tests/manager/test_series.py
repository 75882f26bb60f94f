"""Merging the series of several frontends: each once, under its frontend's name, and validated."""

import math
from collections.abc import Callable, Mapping
from typing import Any

import msgspec
import pytest
from prometheus_client import Metric, exposition, parser
from prometheus_client.openmetrics import exposition as openmetrics
from prometheus_client.openmetrics import parser as openmetrics_parser

from tercet.frontend.manager.counters import LENGTH_BOUNDS, Counters, Exchange, RequestOutcome
from tercet.frontend.manager.series import check_series, families_of, frontend_series
from tercet.frontend.routing.peers import PeerRegistry
from tercet.protocol.messages.codec import Codec, encode
from tercet.protocol.messages.messages import Series
from tercet.protocol.messages.values import Exemplar, FinishType, HistogramSample, Sample

ODD = 'a "model"\\of\n{lines}'


class Exposition:
    """Exposition format of prometheus_client."""

    def __init__(self, frontends: Mapping[str, Series]) -> None:
        self._families = list(families_of(frontends))

    def collect(self) -> list[Metric]:
        return self._families


def as_text(frontends: Mapping[str, Series]) -> list[Metric]:
    text = exposition.generate_latest(Exposition(frontends)).decode()
    return list(parser.text_string_to_metric_families(text))


def as_openmetrics(frontends: Mapping[str, Series]) -> list[Metric]:
    text = openmetrics.generate_latest(Exposition(frontends)).decode()  # type: ignore[no-untyped-call]
    return list(openmetrics_parser.text_string_to_metric_families(text))  # type: ignore[no-untyped-call]


def finished_series(finished: int, *models: str) -> Series:
    counters = Counters()
    counters.outcomes[RequestOutcome.FINISHED] = finished
    counters.exchanges[Exchange("GET", "/metrics", 200)] = 3
    for model in models:
        counters.models[model].finishes[FinishType.STOP] = finished
        counters.models[model].prompt_tokens.observe(5.0, finished)
    return frontend_series("series-0", counters, PeerRegistry(), 2, 1)


@pytest.mark.parametrize("read", [as_text, as_openmetrics])
def test_each_frontends_series_stand_under_its_name_and_each_family_once(
    read: Callable[[Mapping[str, Series]], list[Metric]],
) -> None:
    families = read(
        {
            "frontend-0": finished_series(4, "tiny", ODD),
            "frontend-1": finished_series(9, "tiny"),
            "frontend-2": finished_series(0),
        }
    )
    names = [family.name for family in families]
    assert len(names) == len(set(names)) > 15
    values = {(each.name, *sorted(each.labels.items())): each.value for family in families for each in family.samples}
    assert len(values) == sum(len(family.samples) for family in families), "a series comes twice"

    def value(name: str, frontend: str, **labels: str) -> float | None:
        return values.get((f"tercet_{name}", *sorted({"frontend": frontend, **labels}.items())))

    assert [value("requests_total", f"frontend-{each}", outcome="finished") for each in range(3)] == [4, 9, 0]
    assert [value("requests_open", f"frontend-{each}") for each in range(3)] == [2, 2, 2]
    own = [value("request_prompt_tokens_count", f"frontend-{each}", model="tiny") for each in range(3)]
    assert own == [4, 9, None]
    assert value("request_prompt_tokens_sum", "frontend-1", model="tiny") == 45
    assert value("request_prompt_tokens_bucket", "frontend-1", model="tiny", le="4.0") == 0
    assert value("request_prompt_tokens_bucket", "frontend-1", model="tiny", le="8.0") == 9
    assert value("request_prompt_tokens_bucket", "frontend-1", model="tiny", le="+Inf") == 9
    assert value("choices_finished_total", "frontend-0", model=ODD, reason="stop") == 4


def test_what_a_frontend_counts_makes_sense_to_another() -> None:
    sent = finished_series(4, "tiny", ODD)
    check_series(sent)
    received = Codec(Series).decode(encode(sent))
    assert received == sent


def test_names_of_a_later_version_are_passed_over() -> None:
    later = finished_series(4, "tiny")
    later.samples["gpu_hours"] = [Sample(labels=["gpu"], value=-1.0)]
    later.histograms["naps"] = [HistogramSample(labels=[], buckets=[1], sum=1.0)]
    check_series(later)
    assert as_text({"frontend-0": later}) == as_text({"frontend-0": finished_series(4, "tiny")})


def test_what_an_older_version_does_not_count_is_left_out() -> None:
    older = Series(id="series-0", samples={"requests_open": [Sample(value=3)]})
    check_series(older)
    [sample] = [each for family in as_text({"frontend-0": older}) for each in family.samples]
    assert (sample.name, sample.labels, sample.value) == ("tercet_requests_open", {"frontend": "frontend-0"}, 3)


BUCKETS = [0] * (len(LENGTH_BOUNDS) + 1)
TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"


@pytest.mark.parametrize(
    ("bucket", "exemplar"),
    [
        (3, Exemplar(trace_id=TRACE, value=99.0, at=1.0)),
        (99, Exemplar(trace_id=TRACE, value=1e9, at=1.0)),
        (0, Exemplar(trace_id=TRACE, value=math.nan, at=1.0)),
        (0, Exemplar(trace_id=TRACE, value=0.5, at=math.inf)),
        (0, Exemplar(trace_id=f'{TRACE[:30]}"}}', value=0.5, at=1.0)),
    ],
)
def test_invalid_exemplars_are_refused(bucket: int, exemplar: Exemplar) -> None:
    series = finished_series(4, "tiny")
    sample = HistogramSample(labels=["m"], buckets=BUCKETS, sum=0, exemplars={bucket: exemplar})
    series.histograms["request_prompt_tokens"] = [sample]
    with pytest.raises(ValueError, match="request_prompt_tokens has an invalid exemplar"):
        check_series(series)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"requests_open": [Sample(value=1), Sample(value=2)]}, "the same labels twice"),
        ({"requests_open": [Sample(labels=["x"], value=1)]}, "other labels"),
        ({"requests": [Sample(labels=[], value=1)]}, "other labels"),
        ({"requests": [Sample(labels=["finished", "frontend-0"], value=1)]}, "other labels"),
        ({"requests": [Sample(labels=["x" * 1001], value=1)]}, "other labels"),
        ({"requests": [Sample(labels=["finished"], value=-1)]}, "no number of things"),
        ({"requests": [Sample(labels=["finished"], value=math.nan)]}, "no number of things"),
        ({"requests": [Sample(labels=["finished"], value=math.inf)]}, "no number of things"),
        ({"requests": [Sample(labels=[str(each)], value=1) for each in range(10_001)]}, "more than 10000"),
        ({"unknown": [Sample(value=1)] * 10_001}, "more than 10000"),
        ({"request_prompt_tokens": [HistogramSample(labels=["m"], buckets=[], sum=0)]}, "no histogram of 21"),
        ({"request_prompt_tokens": [HistogramSample(labels=["m"], buckets=BUCKETS[1:], sum=0)]}, "no histogram of 21"),
        ({"request_prompt_tokens": [HistogramSample(labels=["m"], buckets=[*BUCKETS, 0], sum=0)]}, "no histogram"),
        ({"request_prompt_tokens": [HistogramSample(labels=["m"], buckets=[-1, *BUCKETS[1:]], sum=0)]}, "no histogram"),
        ({"request_prompt_tokens": [HistogramSample(labels=["m"], buckets=BUCKETS, sum=math.nan)]}, "no histogram"),
        ({"request_prompt_tokens": [HistogramSample(labels=["m"], buckets=BUCKETS, sum=0)] * 2}, "labels twice"),
        ({"request_prompt_tokens": [HistogramSample(labels=[], buckets=BUCKETS, sum=0)]}, "other labels"),
    ],
)
def test_what_no_frontend_counts_is_refused(change: dict[str, list[Any]], why: str) -> None:
    field = "histograms" if "request_prompt_tokens" in change else "samples"
    good = finished_series(4, "tiny")
    with pytest.raises(ValueError, match=why):
        check_series(msgspec.structs.replace(good, **{field: {**getattr(good, field), **change}}))
