"""Steps that run before any request: the largest one, to measure its memory, and ordinary ones, to compile kernels."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import count, cycle, product, takewhile

import msgspec
import torch

from tercet.kernels.attention.api import AttentionBackend
from tercet.kernels.ops.lora import LONGEST_RUN
from tercet.protocol.messages.values import SamplingParams, pack_ints
from tercet.scheduler.config import InsufficientMemoryError
from tercet.scheduler.core.plan import Plan, Row, SlotInit
from tercet.scheduler.device.oom import lacks_memory
from tercet.scheduler.executor.kv_pool import KVGroup, KVPool, KVShape
from tercet.scheduler.executor.media.audio import StepAudio
from tercet.scheduler.executor.media.prompt_media import LoadedMedia
from tercet.scheduler.executor.media.step_media import StepMedia
from tercet.scheduler.executor.media.texts import StepTexts
from tercet.scheduler.executor.model_runner import Model, ModelRunner
from tercet.scheduler.executor.sampling.sampler import SamplingOps
from tercet.scheduler.executor.state_pool import StatePool
from tercet.scheduler.models.config.recurrent_config import StateTensor

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
_PENALIZED = tuple(msgspec.structs.replace(each, repetition_penalty=1.1) for each in _ORDINARY)
_TOPS = (5, 20)
"""Numbers of top log-probabilities that have kernels of their own."""
_SHORTEST = 100
"""Tokens of a sequence that a decode does not split. Each doubling of the length doubles the number of splits."""


def worst_plan(slots: int, tokens: int, context_length: int) -> Plan:
    """Return the largest step: the token budget is used, and every slot samples with penalties, filters and
    log-probabilities.
    """
    lengths, room = [1] * slots, tokens - slots
    for slot in reversed(range(slots)):
        more = max(0, min(room, context_length - 1))
        lengths[slot] += more
        room -= more
    return _prefill_plan([_prompt(slot, length, _WORST, top=_MOST_LOGPROBS) for slot, length in enumerate(lengths)])


def ordinary_plans(slots: int, tokens: int, context_length: int, *, chained: bool, adapted: bool) -> Iterator[Plan]:
    """Yield steps of up to `tokens` tokens, one for each kind for which kernels are compiled on first use.

    Without them, requests would wait some seconds for a cold compilation. All steps write to one page. Decodes also
    come `chained`, with one draft token, and `adapted`, with the adapter in slot 0, which may be empty.
    """
    if context_length <= 2:
        return
    for sampling, top in [*product(_ORDINARY[:1] + _PENALIZED[:1], _TOPS), *((each, -1) for each in _PENALIZED[1:])]:
        yield _prefill_plan([_prompt(0, 1, sampling, top=top)])
    if adapted:
        yield from _adapter_plans(min(tokens, context_length - 2))
    yield from _prompt_plans(min(tokens, context_length - 2), chained=chained and slots > 1)
    yield _prefill_plan([_prompt(slot, 1, sampling) for slot, sampling in zip(range(slots), cycle(_ORDINARY))])
    for rows in _doubled(2, slots):
        yield Plan(step=0, rows=[Row(slot, 1, 1, sample=True) for slot in range(rows)])
    if slots > 1 and tokens > 2:
        for length in _doubled(_SHORTEST, context_length):
            yield Plan(step=0, rows=[Row(0, length - 1, 1, sample=True), Row(1, 0, 2, sample=True)])


def _adapter_plans(longest: int) -> Iterator[Plan]:
    """Yield a short prompt and one that is a whole segment (`LoRARows`), each with a decode."""
    for length in sorted({min(length, longest) for length in (2, LONGEST_RUN)}):
        yield _prefill_plan([_prompt(0, length, _ORDINARY[0], adapter=0)])
        yield Plan(step=0, rows=[Row(0, length, 1, sample=True)])


def _prompt_plans(longest: int, *, chained: bool) -> Iterator[Plan]:
    """Yield prompts of every length that has kernel configurations of its own, each with a decode."""
    for length, sampling in zip([*_doubled(1, longest - 1), longest], cycle(_ORDINARY)):
        yield _prefill_plan([_prompt(0, length, sampling)])
        decode = Row(0, length, 1, sample=True)
        yield Plan(step=0, rows=[decode])
        if chained:
            yield Plan(step=0, rows=[decode, Row(0, length + 1, 1, sample=True)], draft_tokens={1: 0})


def _doubled(first: int, most: int) -> Iterator[int]:
    """Yield `first` and its doublings up to `most`."""
    return takewhile(lambda number: number <= most, (first << time for time in count()))


def _prompt(slot: int, length: int, sampling: SamplingParams, *, top: int = -1, adapter: int = -1) -> SlotInit:
    tokens = pack_ints([0] * length)
    return SlotInit(
        slot=slot,
        tokens=tokens,
        prompt_tokens=length,
        choice=0,
        sampling=sampling,
        top_logprobs=top,
        adapter=adapter,
    )


def _prefill_plan(inits: Sequence[SlotInit]) -> Plan:
    """Return a step of all tokens of some choices."""
    rows = [Row(init.slot, 0, init.prompt_tokens, sample=True) for init in inits]
    return Plan(step=0, introduce=[*inits], rows=rows)


def compile_mask_kernels(ops: SamplingOps, vocab_size: int, dtype: torch.dtype, device: torch.device) -> None:
    """Compile the kernels that apply grammar masks to logits: in the model's dtype, and in float32 for penalized
    rows.
    """
    mask = torch.zeros(1, -(-vocab_size // 32), dtype=torch.int32, device=device)
    for each in (dtype, torch.float32):
        ops.apply_bitmask_(torch.zeros(1, vocab_size, dtype=each, device=device), mask)


def one_page_runner(
    model: Model,
    backend: Callable[[], AttentionBackend],
    ops: SamplingOps,
    layers: Mapping[int, KVShape],
    *,
    slots: int,
    context_length: int,
    vocab_size: int,
    device: torch.device,
    states: Mapping[int, Sequence[StateTensor]] = {},
    encoder: StepAudio | StepTexts | None = None,
) -> ModelRunner:
    """Return a runner over a cache of one page, which all rows overwrite. Its steps are not split."""
    pool = KVPool([KVGroup(name="rehearsal", layers=layers, pages=1)], device)
    return ModelRunner(
        model,
        pool,
        backend,
        slots=slots,
        context_length=context_length,
        vocab_size=vocab_size,
        device=device,
        sampling_ops=ops,
        release=_refuse,
        states=StatePool(states, slots, 0, device) if states else None,
        media=None if encoder is None else StepMedia(None, encoder, sliced=False),
    )


def profile_run(
    runner: ModelRunner, plan: Plan, images: LoadedMedia | None, encoder: StepAudio | StepTexts | None
) -> None:
    """Run the largest plan: only its memory matters.

    An image, an audio clip or a text is encoded before, as in steps. Raise torch.OutOfMemoryError if it does not fit.
    """
    if images is not None:
        images.encode_blank()
    if encoder is not None:
        encoder.encode_blank()
    runner.execute(plan).result()


def _refuse() -> None:
    raise torch.OutOfMemoryError("no memory to sample for every row at once")


def measured_kv_bytes(available: Callable[[], int], run: Callable[[], None], share: float, tokens: int) -> int:
    """Return the `share` of memory available after a profile run, whose memory the allocator keeps for later steps.

    Raise InsufficientMemoryError if the profile run itself does not fit.
    """
    try:
        run()
    except (MemoryError, RuntimeError) as error:
        if not lacks_memory(error):
            raise
        raise InsufficientMemoryError(
            f"there is no memory for a step of {tokens} tokens: lower chunked_prefill_size or max_running_requests"
        ) from error
    return int(available() * share)
