"""Bubble of pipeline stages, and the efficiency of the core's plans for them, in real time.

The stages are threads that sleep for the time of a step; the model of the requests is the fake executor, which costs
little. Efficiency is the ideal time over the time taken. Ideally a step with an equal share of the requests ends as
often as a stage takes a step: each `STEP` seconds, and what a busy machine adds. The bubble is the share of the time in
which a stage has no step.
"""

import threading
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future
from queue import SimpleQueue

from tercet.scheduler.core.config import CoreConfig
from tercet.scheduler.core.events import Arrival
from tercet.scheduler.core.plan import Capacity, Plan, StepResult
from tercet.scheduler.core.scheduler import Scheduler
from tercet.scheduler.testing import FakeExecutor, request, small_capacity

Measured = tuple[str, float, str, float | None]
"""(figure, measured, unit, target or None)"""

STEP = 0.01
"""Seconds of a stage for a step of any size, as for a decode, which takes the time to read the weights."""
TOKENS = 96
TARGET = 90.0
STAGES = (2, 4)
_Work = tuple[StepResult, "Future[StepResult]"]


class Stages:
    """Threads, one a stage, each of which sleeps for a step and passes it on."""

    def __init__(self, capacity: Capacity, count: int) -> None:
        self._fake = FakeExecutor(capacity, verify=False)
        self._queues: list[SimpleQueue[_Work | None]] = [SimpleQueue() for _ in range(count)]
        self.busy = [0.0] * count
        """Seconds in which each stage had a step."""
        self.steps = 0
        self._threads = [threading.Thread(target=self._run, args=(stage,)) for stage in range(count)]
        for thread in self._threads:
            thread.start()

    def submit(self, plan: Plan) -> "Future[StepResult]":
        """Start a step in the first stage."""
        future: Future[StepResult] = Future()
        self.steps += 1
        self._queues[0].put((self._fake.submit(plan).result(), future))
        return future

    def close(self) -> None:
        """End the threads, once all steps are done."""
        self._queues[0].put(None)
        for thread in self._threads:
            thread.join()
        self._fake.close()

    def _run(self, stage: int) -> None:
        while (work := self._queues[stage].get()) is not None:
            began = time.perf_counter()
            time.sleep(STEP)
            self.busy[stage] += time.perf_counter() - began
            if stage + 1 < len(self._queues):
                self._queues[stage + 1].put(work)
            else:
                work[1].set_result(work[0])
        if stage + 1 < len(self._queues):
            self._queues[stage + 1].put(None)


def efficiency_and_bubble(stages: int, requests: int) -> tuple[float, float]:
    """Return the efficiency of `requests` that decode at the same time, and the bubble, in percent."""
    capacity = small_capacity(pages=requests * 8, page_size=16, slots=requests)
    core, executor = Scheduler(CoreConfig(token_budget=512, stages=stages), capacity), Stages(capacity, stages)
    for number in range(requests):
        asked = request(f"r{number}", [number % 49 + 1, 2, 3], max_new_tokens=TOKENS, ignore_eos=True)
        core.handle(Arrival("frontend", asked))
    in_flight: deque[Future[StepResult]] = deque()
    began = time.perf_counter()
    while (plan := core.schedule()) or in_flight:
        if plan:
            in_flight.append(executor.submit(plan))
        if not plan or len(in_flight) > stages:
            core.commit(in_flight.popleft().result())
    took = time.perf_counter() - began
    executor.close()
    if core.counters.output_tokens != requests * TOKENS:
        raise AssertionError("every request should have its tokens")
    busy = sum(executor.busy) / stages
    ideal = TOKENS * min(stages, requests) * busy / executor.steps
    return 100 * ideal / took, 100 * (1 - busy / took)


def rows() -> Iterator[Measured]:
    """Yield the figures for one request, for as many as stages, and for more."""
    for stages in STAGES:
        for requests in (1, stages, 8 * stages, 64):
            efficiency, bubble = efficiency_and_bubble(stages, requests)
            what = f"{stages} stages of {1000 * STEP:.0f} ms, {requests} requests"
            yield f"{what}: efficiency", efficiency, "%", TARGET if requests >= stages else None
            yield f"{what}: bubble", bubble, "%", None
