"""Steps that are run before any request: the worst one, for its memory, and ordinary ones, for their kernels."""

from collections.abc import Callable, Iterator, Sequence
from itertools import cycle

import torch

from tercet.kernels.attention.api import AttentionBackend
from tercet.protocol.values import SamplingParams, pack_ints
from tercet.scheduler.core.plan import Plan, Row, SlotInit
from tercet.scheduler.executor.kv_pool import KVGroup, KVPool, KVShape
from tercet.scheduler.executor.model_runner import Model, ModelRunner
from tercet.scheduler.executor.sampler import SamplingOps
from tercet.scheduler.executor.shortage import lacks_memory

_WORST = SamplingParams(
    max_new_tokens=1,
    temperature=1.0,
    top_k=50,
    top_p=0.9,
    repetition_penalty=1.1,
    frequency_penalty=0.1,
    presence_penalty=0.1,
)
_MOST_LOGPROBS = 20
_ORDINARY = (
    SamplingParams(max_new_tokens=1, temperature=0.0),
    SamplingParams(max_new_tokens=1, temperature=1.0),
    SamplingParams(max_new_tokens=1, temperature=1.0, top_k=50, top_p=0.9),
)
_LENGTHS = (1, 2, 4, 8, 16, 32, 64, 128)
"""Of prompts for which kernels are cut up in ways of their own."""


def worst_plan(slots: int, tokens: int, context_length: int) -> Plan:
    """As many tokens as a step may have, and every slot samples with penalties, filters and log-probabilities."""
    counts, room = [1] * slots, tokens - slots
    for slot in reversed(range(slots)):
        more = max(0, min(room, context_length - 1))
        counts[slot] += more
        room -= more
    inits = [
        SlotInit(
            slot=slot,
            tokens=pack_ints([0] * count),
            prompt_tokens=count,
            choice=0,
            sampling=_WORST,
            top_logprobs=_MOST_LOGPROBS,
        )
        for slot, count in enumerate(counts)
    ]
    rows = [Row(slot, 0, count, sample=True) for slot, count in enumerate(counts)]
    return Plan(step=0, introduce=inits, rows=rows)


def ordinary_plans(slots: int, context_length: int, *, chained: bool) -> Iterator[Plan]:
    """Short prompts, sampled in every usual way, and a decode after each, `chained` with one that is assumed.

    All are of the same slots and write over one page. Kernels that are compiled when they are first needed are compiled
    by these: a request that came first would wait for them, some seconds where they were never compiled before.
    """
    for number, (length, sampling) in enumerate(zip(_LENGTHS, cycle(_ORDINARY))):
        if length + 2 > context_length:
            return
        used = range(min(slots, 1 + number % 2))
        inits = [
            SlotInit(slot=slot, tokens=pack_ints([0] * length), prompt_tokens=length, choice=0, sampling=sampling)
            for slot in used
        ]
        yield Plan(step=0, introduce=inits, rows=[Row(slot, 0, length, sample=True) for slot in used])
        decodes = [Row(slot, length, 1, sample=True) for slot in used]
        yield Plan(step=0, rows=decodes)
        if chained and slots > len(used):
            yield Plan(step=0, rows=[*decodes, Row(0, length + 1, 1, sample=True)], assumed={len(decodes): 0})


def rehearse(
    model: Model,
    backend: Callable[[], AttentionBackend],
    ops: SamplingOps,
    shape: KVShape,
    *,
    layers: Sequence[int],
    slots: int,
    tokens: int,
    context_length: int,
    vocab_size: int,
    device: torch.device,
) -> None:
    """Run the worst plan over a cache of one page, which all its rows write over: only the memory it takes matters.

    It is not computed in parts: raises torch.OutOfMemoryError where there is no memory for all of it at once.
    """
    pool = KVPool([KVGroup(name="rehearsal", layers=layers, pages=1)], shape, device)
    runner = ModelRunner(
        model,
        pool,
        backend,
        slots=slots,
        context_length=context_length,
        vocab_size=vocab_size,
        device=device,
        sampling_ops=ops,
        release=_refuse,
    )
    runner.execute(worst_plan(slots, tokens, context_length)).result()


def _refuse() -> None:
    raise torch.OutOfMemoryError("no memory to sample for every row at once")


def measured_kv_bytes(available: Callable[[], int], run: Callable[[], None], share: float, tokens: int) -> int:
    """The `share` of what is available after a rehearsal, whose memory the allocator keeps for the steps to come.

    Raises ValueError where there is not even memory for the rehearsal.
    """
    try:
        run()
    except (MemoryError, RuntimeError) as error:
        if not lacks_memory(error):
            raise
        raise ValueError(
            f"the model leaves no memory for a step of {tokens} tokens: lower the step or the slots"
        ) from error
    return int(available() * share)
