"""Gain of speculative decoding, and its cost when draft tokens are wrong: alternating answers with and without it.

The model has random weights in the shape of Qwen2.5-0.5B, and generates random tokens, so that only predicted outputs
give drafts. A prediction is the answer with a share of wrong tokens. Answers are compared, and must be equal.
"""

import json
import random
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median

from benchmarks.micro.cpu import MODELS
from tercet.protocol.messages.messages import BatchTokenIDOutput
from tercet.protocol.messages.values import unpack_ints
from tercet.scheduler.core.config import CoreConfig
from tercet.scheduler.core.events import Arrival
from tercet.scheduler.core.scheduler import Scheduler
from tercet.scheduler.executor.tp_worker import TpModelWorker
from tercet.scheduler.executor.worker_options import WorkerOptions
from tercet.scheduler.testing import request

Measured = tuple[str, float, str, float | None]
"""(figure, measured, unit, target or None)"""

PROMPT, ANSWER, ROUNDS = 64, 96, 3
ROWS = 8
RIGHT = (0.0, 0.5, 0.8, 0.95, 1.0)
VOCABULARY = 150_000


class Bench:
    """Worker, with cores that speculate or do not."""

    def __init__(self, directory: Path, quantization: str) -> None:
        self.worker = TpModelWorker(
            WorkerOptions(
                model=directory,
                device="cpu",
                load_format="dummy",
                slots=8,
                context_length=512,
                kv_cache_bytes=1 << 28,
                grammar_backend="none",
                quantization=quantization,  # type: ignore[arg-type]
                draft_rows=ROWS,
            )
        )

    def serve(self, count: int, rows: int, predictions: Sequence[Sequence[int]] = ()) -> tuple[float, list[list[int]]]:
        """Return (seconds after the prompts, answers) of `count` concurrent requests, with drafts if `rows` > 0."""
        core = Scheduler(CoreConfig(draft_rows=rows, radix_cache=False), self.worker.capacity)
        for number in range(count):
            asked = request(
                f"r{number}",
                [(7 * number + 13 * place) % 1000 for place in range(PROMPT)],
                prediction=predictions[number] if predictions else (),
                max_new_tokens=ANSWER,
                ignore_eos=True,
                seed=number,
            )
            core.handle(Arrival("frontend", asked))
        said: dict[str, list[int]] = {}
        start = 0.0
        while plan := core.schedule():
            start = start or (time.perf_counter() if not plan.introduce else 0.0)
            for _, message, *_ in core.commit(self.worker.submit(plan).result()):
                assert isinstance(message, BatchTokenIDOutput)
                ids, offsets = unpack_ints(message.token_ids), unpack_ints(message.offsets)
                for row, rid in enumerate(message.rids):
                    said.setdefault(rid, []).extend(ids[offsets[row] : offsets[row + 1]])
        return time.perf_counter() - start, [said[f"r{number}"] for number in range(count)]


def predicted(answers: Sequence[Sequence[int]], right: float) -> list[list[int]]:
    """Return the answers with a share `right` of correct tokens."""
    chance = random.Random(5)
    return [[token if chance.random() < right else chance.randrange(VOCABULARY) for token in each] for each in answers]


def rows() -> Iterator[Measured]:
    """Yield tokens per second, and the ratio to the same requests without speculation."""
    with tempfile.TemporaryDirectory() as name:
        (Path(name) / "config.json").write_text(json.dumps(MODELS["qwen-0.5b"]))
        for quantization, title in (("none", "bfloat16"), ("int8", "int8")):
            bench = Bench(Path(name), quantization)
            for count in (1, 4):
                yield from told(bench, f"{title}, {count} at once", count)
            bench.worker.close()


def told(bench: Bench, what: str, count: int) -> Iterator[Measured]:
    """Yield the figures of `count` concurrent requests."""
    truth = bench.serve(count, 0)[1]
    predictions = {right: predicted(truth, right) for right in RIGHT}
    plain: list[float] = []
    guessed: dict[float, list[float]] = {right: [] for right in RIGHT}
    same = True
    for _ in range(ROUNDS):
        seconds, answers = bench.serve(count, 0)
        plain.append(seconds)
        for right in RIGHT:
            seconds, answers = bench.serve(count, ROWS, predictions[right])
            same = same and answers == truth
            guessed[right].append(seconds)
    yield f"{what}, none guessed", count * ANSWER / median(plain), "tokens/s", None
    for right in RIGHT:
        ratio = median(before / after for before, after in zip(plain, guessed[right], strict=True))
        yield f"{what}, {right:.0%} of what is predicted is right", ratio, "times", None
    yield f"{what}, answers the same", float(same), "", None
