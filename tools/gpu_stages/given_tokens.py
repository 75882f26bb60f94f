"""Log-probabilities of given tokens, by which a device is compared with its reference.

Both compute the same prompts through the real worker, which returns the log-probability of every token: two pieces of
each prompt by extends, the second over the cache of the first, and the rest token by token as decodes (on a GPU by
recorded graphs), of fewer and fewer prompts. Rounding cannot make one diverge, because the next token is given.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from tercet.protocol.messages.values import LoRAAdapter, SamplingParams, pack_ints, unpack_floats
from tercet.scheduler.core.places.loads import AdapterLoad
from tercet.scheduler.core.plan import PageUpdate, Plan, Row, SlotInit
from tercet.scheduler.executor.graphs.cuda_graphs import CudaGraphRunner, decode_buckets
from tercet.scheduler.executor.model_runner import Replays
from tercet.scheduler.executor.slot_tables import StepInputs
from tercet.scheduler.executor.tp_worker import TpModelWorker
from tools.gpu_stages.processes import NOT_RUN
from tools.gpu_stages.scale import Results, Scale
from tools.gpu_stages.worker import NOBODY, PAGE_SIZE, make_worker

SHARE = 0.02
"""Allowed RMS error of 16-bit weights against 32-bit weights, as a share of the spread of log-probabilities."""
LEAST = 1e-4
"""Allowed error of float32 sums in another order."""


@dataclass(frozen=True, kw_only=True)
class Prompts:
    """Prompts of equal length, one per slot."""

    places: Sequence[int]
    """Adapter slot of each prompt."""
    decoded: Sequence[Sequence[int]]
    """Slots of the decodes in each part of the second half. A slot that has left does not return."""
    adapters: Sequence[Path] = ()
    """Adapters by slot."""
    rank: int = 1
    """Highest rank of an adapter."""


def scored(
    directory: Path,
    scale: Scale,
    prompts: Prompts,
    *,
    cache: str = "auto",
    attention: str = "auto",
    other: Path | None = None,
) -> list[torch.Tensor]:
    """Return the log-probabilities of the tokens of each prompt but the first, float32 [tokens].

    With a directory of `other` weights, the worker loads them after it has computed all prompts, and computes all
    again.

    Raises RuntimeError if there are graphs, but not for all decodes.
    """
    length, slots = scale.compared_tokens, len(prompts.places)
    worker = make_worker(
        directory,
        scale,
        slots=slots,
        context=length,
        step=slots * length,
        attention=attention,
        load_format="safetensors",
        cache=cache,
        loras=len(prompts.adapters),
        rank=prompts.rank,
    )
    found = _read(worker, scale, prompts)
    if other is not None:
        worker.submit(Plan(step=0, weights=str(other), rows=[])).result()
        found = _read(worker, scale, prompts)
    worker.close()
    return found


def _read(worker: TpModelWorker, scale: Scale, prompts: Prompts) -> list[torch.Tensor]:
    length, slots = scale.compared_tokens, len(prompts.places)
    found: list[list[float]] = [[] for _ in prompts.places]
    graphs, decodes = count_replays(worker), 0
    adapted = any(place != NOBODY for place in prompts.places)
    for plan in _plans(prompts, length, scale.compared.vocab):
        result = worker.submit(plan).result()
        if plan.rows[0].count > 1:
            record_graphs(worker, slots, adapted=adapted)
        else:
            decodes += 1
        for index in sorted(result.prompt_logprobs):
            found[plan.rows[index].slot] += unpack_floats(result.prompt_logprobs[index].chosen)
    if graphs is not None and graphs.plain + graphs.adapted < decodes:
        raise RuntimeError(f"of {decodes} decodes only {graphs.plain + graphs.adapted} were replayed from graphs")
    return [torch.tensor(each) for each in found]


def _plans(prompts: Prompts, length: int, vocab: int) -> Iterator[Plan]:
    """Yield two extends of every prompt, up to its middle, then decodes."""
    slots = range(len(prompts.places))
    inits = [
        SlotInit(
            slot=slot,
            tokens=pack_ints((7919 * slot + 31 * place + place * place) % vocab for place in range(length)),
            prompt_tokens=length,
            choice=0,
            sampling=SamplingParams(max_new_tokens=1),
            top_logprobs=0,
            prompt_logprobs=True,
            adapter=prompts.places[slot],
        )
        for slot in slots
    ]
    quarter, half = length // 4, length // 4 * 2
    loads = [AdapterLoad(place, LoRAAdapter(str(path))) for place, path in enumerate(prompts.adapters)]
    pages = [PageUpdate(slot, 0, [_pages(slot, length)]) for slot in slots]
    rows = [[Row(slot, first, quarter, sample=False) for slot in slots] for first in (0, quarter)]
    yield Plan(step=0, adapters=loads, introduce=inits, pages=pages, rows=rows[0])
    yield Plan(step=1, rows=rows[1])
    for place in range(half, length - 1):
        part = (place - half) * len(prompts.decoded) // (length - half)
        decodes = [Row(slot, place, 1, sample=False) for slot in prompts.decoded[part]]
        yield Plan(step=2 + place - half, rows=decodes)


def _pages(slot: int, length: int) -> list[int]:
    each = -(-length // PAGE_SIZE)
    return list(range(slot * each, (slot + 1) * each))


class CountedReplays:
    """Graphs of a worker that count the steps they have replayed."""

    def __init__(self, graphs: Replays) -> None:
        self.counted = graphs
        self.plain = 0
        self.adapted = 0
        """Replayed steps in which a row has an adapter."""

    def replay(self, inputs: StepInputs, *, adapted: bool = False) -> torch.Tensor | None:
        """See `Replays`."""
        hidden = self.counted.replay(inputs, adapted=adapted)
        if hidden is not None:
            self.plain += not adapted
            self.adapted += adapted
        return hidden

    def replay_sampling(self, inputs: StepInputs, *, adapted: bool = False) -> torch.Tensor | None:
        """See `Replays`."""
        return self.counted.replay_sampling(inputs, adapted=adapted)

    def capture_next(self) -> bool:
        """See `Replays`."""
        return self.counted.capture_next()


def count_replays(worker: TpModelWorker) -> CountedReplays | None:
    """Count from now on; return None if the worker has no graphs."""
    runner = worker._runner
    if runner.graphs is None:
        return None
    runner.graphs = counted = CountedReplays(runner.graphs)
    return counted


def record_graphs(worker: TpModelWorker, slots: int, *, adapted: bool = False, chained: int = 0) -> None:
    """Record all graphs, those with adapters, and those of up to `chained` rows, after a step has requested them.

    Raises RuntimeError if one cannot be recorded, which serving would only log.
    """
    while worker.prepare():
        pass
    recorded, wanted = worker._runner.graphs, len(decode_buckets(slots)) * (2 if adapted else 1)
    wanted += sum(rows > 1 for rows in decode_buckets(chained)) if chained else 0
    if isinstance(recorded, CountedReplays):
        recorded = recorded.counted
    if isinstance(recorded, CudaGraphRunner) and len(recorded._graphs) < wanted:
        raise RuntimeError(f"of {wanted} graphs only {len(recorded._graphs)} could be recorded: see the log")


def verdict(far: float, allowed: float, why: str) -> Results:
    """Return whether a distance is within the allowed one, and why that much is allowed."""
    return {"far": far, "allowed": allowed, "why": why, "right": far <= allowed}


def wrong_of(found: Mapping[str, Results]) -> list[str]:
    """Return the verdicts that are wrong or could not be given, without those that were not run."""
    return sorted(
        name for name, result in found.items() if not result.get("right") and result.get("trouble") != NOT_RUN
    )


def far_from(given: torch.Tensor, wanted: torch.Tensor) -> float:
    """Return the RMS of the difference, or NaN, which is never allowed, if there is a NaN."""
    return float((given - wanted).square().mean().sqrt())
