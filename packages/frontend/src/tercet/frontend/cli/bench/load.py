"""Runner of a workload against a server, and its figures."""

import asyncio
import json
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from tercet.frontend.cli.bench.client import BenchError, Target, Timeline, complete
from tercet.frontend.cli.bench.workload import Request, Workload

PERCENTILES = (50, 90, 99)


@dataclass(frozen=True, kw_only=True)
class Goal:
    """Limits on a request that counts as good; None sets no limit."""

    first_token: float | None = None
    per_token: float | None = None

    def met(self, timeline: Timeline) -> bool:
        """Return whether a request was within the limits."""
        per_token = timeline.per_token or 0.0
        return (self.first_token is None or timeline.first_token <= self.first_token) and (
            self.per_token is None or per_token <= self.per_token
        )


@dataclass(frozen=True, kw_only=True)
class Figures:
    """Figures of one workload. Times are milliseconds, by percentile and mean."""

    requests: int
    failed: int
    first_error: str
    short: int
    """Answers with another length than requested."""
    seconds: float
    input_tokens: int
    output_tokens: int
    output_tokens_per_second: float
    requests_per_second: float
    good_requests_per_second: float
    ttft_ms: dict[str, float]
    tpot_ms: dict[str, float]
    itl_ms: dict[str, float]

    def to_json(self, workload: str) -> str:
        return json.dumps({"workload": workload, **asdict(self)})


async def run_workload(
    target: Target, workload: Workload, requests: Sequence[Request], *, goal: Goal = Goal(), rate: float | None = None
) -> Figures:
    """Send every request: at most `concurrency` at a time, or at `rate` a second with random gaps and no such limit."""
    timelines: list[Timeline] = []
    errors: list[str] = []
    short = 0
    waiting = iter(requests)

    async def ask(request: Request) -> None:
        nonlocal short
        try:
            timeline = await complete(target, request.prompt, request.output_tokens)
        except BenchError as error:
            errors.append(str(error))
        else:
            timelines.append(timeline)
            short += timeline.output_tokens != request.output_tokens

    async def ask_in_turn() -> None:
        for request in waiting:
            await ask(request)

    started = time.perf_counter()
    async with asyncio.TaskGroup() as tasks:
        if rate is None:
            for _ in range(workload.concurrency):
                tasks.create_task(ask_in_turn())
        else:
            chance = random.Random(len(requests))  # noqa: S311 - the same gaps in every run
            for request in waiting:
                tasks.create_task(ask(request))
                await asyncio.sleep(chance.expovariate(rate))
    return figures(timelines, errors, short, time.perf_counter() - started, goal)


def figures(timelines: Sequence[Timeline], errors: Sequence[str], short: int, seconds: float, goal: Goal) -> Figures:
    """Return the figures of all requests."""
    output = sum(timeline.output_tokens for timeline in timelines)
    per_token = [timeline.per_token for timeline in timelines if timeline.per_token is not None]
    return Figures(
        requests=len(timelines) + len(errors),
        failed=len(errors),
        first_error=errors[0] if errors else "",
        short=short,
        seconds=seconds,
        input_tokens=sum(timeline.input_tokens or 0 for timeline in timelines),
        output_tokens=output,
        output_tokens_per_second=output / seconds,
        requests_per_second=len(timelines) / seconds,
        good_requests_per_second=sum(map(goal.met, timelines)) / seconds,
        ttft_ms=_summarize([timeline.first_token for timeline in timelines]),
        tpot_ms=_summarize(per_token),
        itl_ms=_summarize([gap for timeline in timelines for gap in timeline.gaps]),
    )


def _summarize(seconds: Sequence[float]) -> dict[str, float]:
    """Return percentiles, by nearest rank, and the mean, in milliseconds; empty if there are no values."""
    if not seconds:
        return {}
    ordered = sorted(seconds)
    ranks = {f"p{percent}": -(-len(ordered) * percent // 100) - 1 for percent in PERCENTILES}
    return {name: 1e3 * ordered[rank] for name, rank in ranks.items()} | {"mean": 1e3 * statistics.fmean(ordered)}
