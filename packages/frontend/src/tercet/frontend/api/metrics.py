"""Prometheus metrics, built on request from the last heartbeats and from counters."""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple, cast

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.openmetrics.exposition import ALLOWUTF8
from starlette.requests import Request
from starlette.responses import Response

from tercet.frontend.http.route import Route
from tercet.frontend.manager.gateway_series import ModelTotals, gateway_series
from tercet.frontend.manager.series import Kind, families_of, family_of
from tercet.frontend.manager.tokenizer_manager import TokenizerManager

METRICS_PATH = "/metrics"
_GAUGES = {
    "queued": "Choices in the queue of a scheduler.",
    "running": "Choices that run.",
    "queued_tokens": "Tokens of the queued choices.",
    "running_tokens": "Tokens of the running choices.",
    "pages": "Pages of the KV cache.",
    "pages_free": "Free pages.",
    "pages_cached": "Pages that only the prefix cache holds.",
    "slots": "Choices that can run at the same time.",
    "slots_free": "Slots without a choice.",
}
_COUNTERS = {
    "prompt_tokens": "Prompt tokens of requests that have begun to run.",
    "cached_prompt_tokens": "Prompt tokens found in the prefix cache.",
    "output_tokens": "Sampled tokens.",
    "drafted_tokens": "Draft tokens.",
    "accepted_tokens": "Accepted draft tokens.",
    "retractions": "Retractions: choices that gave up their pages to others.",
}
"""Counters of a scheduler's load. They restart at zero with the scheduler, as Prometheus expects."""
_STEPS = {
    "steps": "Forward passes.",
    "step_seconds": "Time of all forward passes, in seconds.",
}
"""Counters of a scheduler's heartbeat, which restart as well."""
_FIELDS = {"pages": "pages_total", "slots": "slots_total"}
"""Fields of the load with another name, because Prometheus reserves `_total` for counters."""


class _Collector(NamedTuple):
    """Collector for prometheus_client."""

    families: list[Metric]

    def collect(self) -> list[Metric]:
        return self.families


class Metrics:
    """The /metrics endpoint. Names begin with `tercet_`, except those of `GATEWAY_SERIES`.

    All frontends report the same values of schedulers. A frontend's own counters carry its name. Frontends that share a
    socket all appear in the response, no matter which one answers.
    """

    def __init__(self, manager: TokenizerManager) -> None:
        self._manager = manager

    @property
    def routes(self) -> list[Route]:
        return [Route("GET", METRICS_PATH, self.scrape)]

    async def scrape(self, request: Request) -> Response:
        """Return all metrics in the format that the Accept header prefers."""
        encode, media_type = choose_encoder(request.headers.get("accept", ""))
        frontends = await self._manager.peer_metrics.series()
        frontends[self._manager.peer] = self._manager.series()
        models = await self._model_totals()
        own = families_of(dict(sorted(frontends.items())))
        collector = _Collector([*self._of_schedulers(), *own, *gateway_series(models)])
        text = cast("Callable[..., bytes]", encode)(collector, escaping=ALLOWUTF8)  # vLLM's names have colons
        return Response(text, headers={"content-type": media_type})

    async def _model_totals(self) -> dict[str, ModelTotals]:
        """Return the totals of every model that a scheduler has announced."""
        models: defaultdict[str, ModelTotals] = defaultdict(ModelTotals)
        for each in self._manager.fleet.schedulers.values():
            if each.encoder is None and (name := self._manager.models.name_of(each)):
                models[name].add(each)
        for adapter in await self._manager.adapters.all():
            if adapter.base in models:  # not an alias of --served-model-name
                models[adapter.base].adapters.append(adapter.name)
        for totals in models.values():
            totals.pending_adapters = self._manager.adapters.pending if totals.max_loras else []
        return models

    def _of_schedulers(self) -> Iterator[Metric]:
        labels = ["scheduler", "model"]
        schedulers = [
            ([each.peer, self._manager.models.name_of(each)], each) for each in self._manager.fleet.schedulers.values()
        ]
        kinds: list[tuple[Kind, Mapping[str, str]]] = [(GaugeMetricFamily, _GAUGES), (CounterMetricFamily, _COUNTERS)]
        for kind, texts in kinds:
            for name, text in texts.items():
                field = _FIELDS.get(name, name)
                values = [(label_values, getattr(each.load, field)) for label_values, each in schedulers]
                yield family_of(kind, name, text, labels, values)
        for name, text in _STEPS.items():
            values = [(label_values, getattr(each.heartbeat, name)) for label_values, each in schedulers]
            yield family_of(CounterMetricFamily, name, text, labels, values)
