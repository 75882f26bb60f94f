"""Client whose answers must not suffer: one stream after another, and now and then a short request."""

import asyncio
import time
from dataclasses import dataclass, field

from tercet.frontend.cli.bench.client import BenchError, Target, complete

_TOKENS = 64


@dataclass
class Service:
    """Answers of a client: gaps between the pieces of streams and times of short requests, in seconds."""

    gaps: list[float] = field(default_factory=list)
    short: list[float] = field(default_factory=list)
    failed: int = 0

    def gap(self, share: float) -> float:
        """Return the gap that a `share` of all gaps does not exceed."""
        return _quantile(self.gaps, share)

    @property
    def median_short(self) -> float:
        """Return the median time of a short request."""
        return _quantile(self.short, 0.5)


async def watch(target: Target, stop: asyncio.Event) -> Service:
    """Send requests until `stop` is set, then wait for the running ones."""
    service = Service()
    await asyncio.gather(_stream(target, service, stop), _ask_shortly(target, service, stop))
    return service


async def _stream(target: Target, service: Service, stop: asyncio.Event) -> None:
    while not stop.is_set():
        try:
            timeline = await complete(target, "Once upon a time", _TOKENS)
        except BenchError:
            service.failed += 1
            await asyncio.sleep(0.2)
        else:
            service.gaps += timeline.gaps


async def _ask_shortly(target: Target, service: Service, stop: asyncio.Event) -> None:
    while not stop.is_set():
        began = time.perf_counter()
        try:
            await complete(target, "hi", 1)
        except BenchError:
            service.failed += 1
        else:
            service.short.append(time.perf_counter() - began)
        await asyncio.sleep(0.3)


def _quantile(values: list[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(int(share * len(ordered)), len(ordered) - 1)] if ordered else float("inf")
