"""Cost of a decode step of the embedded model outside the native kernels: Python, and small tensors.

Only the executor runs, with prepared plans. Half of the rows sample, the others are greedy.
"""

import time
from statistics import median
from types import SimpleNamespace
from typing import Any

from tercet.kernels.native.abi import SIGNATURES
from tercet.kernels.native.library import load_library
from tercet.protocol.messages.values import SamplingParams, pack_ints
from tercet.scheduler.core.plan import PageUpdate, Plan, Row, SlotInit
from tercet.scheduler.executor.tp_worker import TpModelWorker
from tercet.scheduler.executor.worker_options import WorkerOptions
from tercet.scheduler.model_files import resolve_model

Measured = tuple[str, float, str, float | None]
"""(figure, measured, unit, target or None)"""

PROMPT, STEPS = 128, 100


class Stopwatch:
    """Sum of the time spent in functions of the native library, until `stop`."""

    def __init__(self, functions: SimpleNamespace) -> None:
        self.seconds = 0.0
        self._functions = functions
        self._untimed = {name: getattr(functions, name) for name in SIGNATURES}
        for name, function in self._untimed.items():
            setattr(functions, name, self._timed(function))

    def stop(self) -> None:
        """Restore the functions."""
        for name, function in self._untimed.items():
            setattr(self._functions, name, function)

    def _timed(self, function: Any) -> Any:
        def call(*arguments: object) -> object:
            start = time.perf_counter()
            try:
                return function(*arguments)
            finally:
                self.seconds += time.perf_counter() - start

        return call


def prefill(worker: TpModelWorker, slots: int) -> None:
    """Give every slot its prompt, and pages for all steps."""
    size = worker.capacity.page_size
    pages = -(-(PROMPT + STEPS + 2) // size)
    for slot in range(slots):
        sampling = SamplingParams(max_new_tokens=STEPS, temperature=slot % 2 * 0.8, seed=slot)
        tokens = pack_ints([(7 * slot + at) % 1000 for at in range(PROMPT)])
        init = SlotInit(slot=slot, tokens=tokens, prompt_tokens=PROMPT, choice=0, sampling=sampling)
        update = PageUpdate(slot, 0, [[slot * pages + page for page in range(pages)]])
        row = Row(slot, 0, PROMPT, sample=True)
        worker.submit(Plan(step=slot, introduce=[init], pages=[update], rows=[row])).result()


def decode(slots: int) -> tuple[float, float]:
    """Return the medians of (seconds of a step, seconds of it outside the native library)."""
    worker = TpModelWorker(WorkerOptions(model=resolve_model("embedded"), slots=slots, dtype="float32"))
    prefill(worker, slots)
    watch = Stopwatch(load_library().functions)
    steps, outside = [], []
    for at in range(STEPS):
        rows = [Row(slot, PROMPT + at, 1, sample=True) for slot in range(slots)]
        start, watch.seconds = time.perf_counter(), 0.0
        worker.submit(Plan(step=slots + at, rows=rows)).result()
        steps.append(time.perf_counter() - start)
        outside.append(steps[-1] - watch.seconds)
    watch.stop()
    worker.close()
    return median(steps), median(outside)


def rows() -> list[Measured]:
    """Return the figures of growing batches."""
    figures: list[Measured] = []
    for slots in (1, 8, 32, 128, 512):
        step, outside = decode(slots)
        figures.append((f"decode step of {slots} rows", step * 1e6, "us", None))
        figures.append((f"decode step of {slots} rows, outside the kernels", outside * 1e6, "us", None))
    return figures
