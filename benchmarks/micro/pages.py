"""Cost of the KV page size on a CPU: core, executor and the embedded model, alternating over all sizes.

Measured are decode steps of 8 rows after prompts of 500 tokens, and the time to the first token of a prompt whose
tokens are cached except the last 20. The cached prefix ends anywhere in a page.
"""

import random
import time
from statistics import median

from tercet.protocol.messages.messages import TokenizedGenerateReqInput
from tercet.protocol.messages.values import SamplingParams, pack_ints
from tercet.scheduler.core.config import CoreConfig
from tercet.scheduler.core.events import Arrival
from tercet.scheduler.core.scheduler import Scheduler
from tercet.scheduler.executor.tp_worker import TpModelWorker
from tercet.scheduler.executor.worker_options import WorkerOptions
from tercet.scheduler.model_files import resolve_model

Measured = tuple[str, float, str, float | None]
"""(figure, measured, unit, target or None)"""

SIZES = (1, 8, 16, 32, 64)
ROWS, PROMPT, STEPS, HITS, OWN = 8, 500, 100, 40, 20
chance = random.Random(1)


class Served:
    """Core with the real executor."""

    def __init__(self, page_size: int) -> None:
        options = WorkerOptions(model=resolve_model("embedded"), device="cpu", slots=ROWS, page_size=page_size)
        self.worker = TpModelWorker(options)
        self.core = Scheduler(CoreConfig(token_budget=options.step_tokens), self.worker.capacity)

    def ask(self, rid: str, prompt: list[int], count: int) -> None:
        """Submit a greedy request for exactly `count` tokens."""
        sampling = SamplingParams(max_new_tokens=count, temperature=0.0, ignore_eos=True)
        asked = TokenizedGenerateReqInput(
            rid=rid,
            attempt=0,
            detokenizer="detokenizer-0",
            input_ids=pack_ints(prompt),
            sampling=sampling,
            decode_spec=b"",
        )
        self.core.handle(Arrival("frontend-0", asked))

    def turn(self) -> bool:
        """Run one turn of the loop, and return False if there was no work."""
        plan = self.core.schedule()
        if plan is not None:
            self.core.commit(self.worker.submit(plan).result())
        return plan is not None

    def finish(self) -> float:
        """Return the seconds until all work is done."""
        start = time.perf_counter()
        while self.turn():
            pass
        return time.perf_counter() - start


def some_ids(count: int) -> list[int]:
    """Return tokens that no other prompt begins with."""
    return [chance.randrange(10, 1000) for _ in range(count)]


def decodes(served: dict[int, Served]) -> dict[int, float]:
    """Return the seconds of a decode step, by page size."""
    prompts = [some_ids(PROMPT) for _ in range(ROWS)]
    for each in served.values():
        for row, prompt in enumerate(prompts):
            each.ask(f"decode-{row}", prompt, STEPS + 20)
        while each.core.counters.steps < ROWS + 4:  # all prompts are computed
            each.turn()
    taken: dict[int, list[float]] = {size: [] for size in served}
    for _ in range(STEPS):
        for size, each in served.items():
            start = time.perf_counter()
            each.turn()
            taken[size].append(time.perf_counter() - start)
    for each in served.values():
        each.finish()
    return {size: median(times) for size, times in taken.items()}


def hits(served: dict[int, Served]) -> dict[int, float]:
    """Return the seconds to a first token after a cached prefix, by page size."""
    taken: dict[int, list[float]] = {size: [] for size in served}
    for number in range(HITS):
        shared = some_ids(PROMPT + number)
        own = some_ids(OWN)
        for size, each in served.items():
            each.ask(f"first-{number}", shared, 1)
            each.finish()
            each.ask(f"hit-{number}", [*shared, *own], 1)
            taken[size].append(each.finish())
    return {size: median(times) for size, times in taken.items()}


def rows() -> list[Measured]:
    """Return the figures of each size."""
    served = {size: Served(size) for size in SIZES}
    steps, firsts = decodes(served), hits(served)
    figures: list[Measured] = []
    for size, each in served.items():
        figures.append((f"pages of {size} tokens: decode step of {ROWS} rows", steps[size] * 1e6, "us", None))
        figures.append((f"pages of {size} tokens: first token after a cached prefix", firsts[size] * 1e6, "us", None))
        each.worker.close()
    return figures
