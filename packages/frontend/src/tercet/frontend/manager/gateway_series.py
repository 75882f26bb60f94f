"""Prometheus series under vLLM's and SGLang's names, which gateways and autoscalers read.

The Gateway API Inference Extension (proposal 003, model server protocol) takes one sample of each series from each
server that it balances. A sample is therefore the total of all schedulers of a model.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from prometheus_client.core import GaugeMetricFamily, Metric

from tercet.frontend.routing.peers import SchedulerPeer


@dataclass
class ModelTotals:
    """Totals of the schedulers of one model, and its adapters."""

    queued: int = 0
    running: int = 0
    pages: int = 0
    pages_used: int = 0
    page_size: int = 0
    max_loras: int = 0
    adapters: list[str] = field(default_factory=list)
    """Adapters that are ready on every scheduler."""
    pending_adapters: list[str] = field(default_factory=list)
    """Adapters that are being loaded."""

    def add(self, scheduler: SchedulerPeer) -> None:
        """Add a scheduler's last report."""
        load = scheduler.load
        self.queued += load.queued
        self.running += load.running
        self.pages += load.pages_total
        self.pages_used += load.pages_used
        self.page_size = load.page_size
        self.max_loras = max(self.max_loras, scheduler.limits.max_loras if scheduler.limits else 0)

    @property
    def usage(self) -> float:
        """Return the share of the KV cache that running choices use."""
        return self.pages_used / self.pages if self.pages else 0.0


class GatewaySeries(NamedTuple):
    """Gauge of a model, with labels besides `model_name`."""

    text: str
    value: Callable[[ModelTotals], float]
    labels: Callable[[ModelTotals], dict[str, str]] = lambda _: {}


GATEWAY_SERIES = {
    "vllm:num_requests_waiting": GatewaySeries("Choices that wait.", lambda totals: totals.queued),
    "vllm:num_requests_running": GatewaySeries("Choices that run.", lambda totals: totals.running),
    "vllm:kv_cache_usage_perc": GatewaySeries("Share of the KV cache in use, 0 to 1.", lambda totals: totals.usage),
    "vllm:cache_config_info": GatewaySeries(
        "Pages of the KV cache and their tokens, as labels.",
        lambda _: 1,
        lambda totals: {"block_size": str(totals.page_size), "num_gpu_blocks": str(totals.pages)},
    ),
    "vllm:lora_requests_info": GatewaySeries(
        "Adapters that are ready and that are being loaded, as labels; the value is the time.",
        lambda _: time.time(),
        lambda totals: {
            "max_lora": str(totals.max_loras),
            "running_lora_adapters": ",".join(totals.adapters),
            "waiting_lora_adapters": ",".join(totals.pending_adapters),
        },
    ),
    "sglang:num_queue_reqs": GatewaySeries("Choices that wait.", lambda totals: totals.queued),
    "sglang:num_running_reqs": GatewaySeries("Choices that run.", lambda totals: totals.running),
    "sglang:token_usage": GatewaySeries("Share of the KV cache in use, 0 to 1.", lambda totals: totals.usage),
    "sglang:cache_config_info": GatewaySeries(
        "Pages of the KV cache and their tokens, as labels.",
        lambda _: 1,
        lambda totals: {"page_size": str(totals.page_size), "num_pages": str(totals.pages)},
    ),
    "sglang:page_size": GatewaySeries("Tokens of a page.", lambda totals: totals.page_size),
    "sglang:num_pages": GatewaySeries("Pages of the KV cache.", lambda totals: totals.pages),
    "sglang:max_total_num_tokens": GatewaySeries(
        "Tokens that the KV cache holds.", lambda totals: totals.pages * totals.page_size
    ),
}
"""Series by name."""


def gateway_series(models: Mapping[str, ModelTotals]) -> Iterator[Metric]:
    """Yield every series of `GATEWAY_SERIES` with one sample for each model."""
    for name, series in GATEWAY_SERIES.items():
        labels = ["model_name", *series.labels(ModelTotals())]
        metric = GaugeMetricFamily(name, series.text, labels=labels)
        for model, totals in models.items():
            metric.add_metric([model, *series.labels(totals).values()], series.value(totals))
        yield metric
