"""Worker without sockets: its slots hold prompts and decode from there, by plans made here or by the real core."""

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch

from tercet.protocol.messages.values import SamplingParams, pack_ints
from tercet.scheduler.core.config import CoreConfig
from tercet.scheduler.core.events import Arrival
from tercet.scheduler.core.plan import PageUpdate, Plan, Row, SlotInit, StepResult
from tercet.scheduler.core.scheduler import Scheduler
from tercet.scheduler.device.oom import release_cached
from tercet.scheduler.executor.forward_batch import ForwardBatch
from tercet.scheduler.executor.model_runner import Model, Replays
from tercet.scheduler.executor.slot_tables import StepInputs
from tercet.scheduler.executor.tp_worker import TpModelWorker
from tercet.scheduler.executor.worker_options import WorkerOptions
from tercet.scheduler.ports import Pending
from tercet.scheduler.testing import request
from tools.gpu_stages.scale import Scale, random_requests

PAGE_SIZE = 16
NOBODY = -1
"""Slot of no adapter."""

Given = TypeVar("Given")


def make_worker(
    directory: Path,
    scale: Scale,
    *,
    slots: int,
    context: int,
    step: int,
    attention: str = "auto",
    load_format: Literal["safetensors", "dummy"] = "dummy",
    cache: str = "auto",
    loras: int = 0,
    rank: int = 1,
    draft_rows: int = 0,
) -> TpModelWorker:
    """Return a worker with random weights, unless others are loaded; `cache` is the dtype of keys and values.

    It can hold `loras` adapters up to a rank, and run steps of up to `draft_rows` rows in which choices have several.
    """
    release_cached()  # memory of the previous worker
    return TpModelWorker(
        WorkerOptions(
            model=directory,
            dtype=str(scale.dtype).removeprefix("torch."),
            device=str(scale.device),
            load_format=load_format,
            slots=slots,
            context_length=context,
            page_size=PAGE_SIZE,
            step_tokens=max(step, slots),
            kv_cache_dtype=cache,
            attention_backend=attention,
            grammar_backend="none",
            max_loras=loras,
            max_lora_rank=rank,
            draft_rows=draft_rows,
        )
    )


class Offline:
    """Worker whose plans are made here: every slot has pages for all its tokens from the start.

    Its page tables are no wider than that, unless a longer `context` is requested. `options` are for `make_worker`.
    """

    def __init__(
        self, directory: Path, scale: Scale, *, slots: int, prompt: int, decodes: int, context: int = 0, **options: Any
    ) -> None:
        self.pages = -(-(prompt + decodes + 8) // PAGE_SIZE)
        context = max(context, self.pages * PAGE_SIZE)
        self.worker = make_worker(directory, scale, slots=slots, context=context, step=prompt, **options)
        room = self.worker.capacity.groups[0].pages
        if room < slots * self.pages:
            raise RuntimeError(
                f"{slots} slots of {self.pages} pages each need {slots * self.pages}, and there are {room}"
            )
        self.lengths = [0] * slots
        self._step = 0

    def init_plan(self, init: SlotInit) -> Plan:
        """Return the plan of a choice's prompt, in a slot with any previous content."""
        slot, tokens = init.slot, init.prompt_tokens
        self.lengths[slot] = tokens
        pages = PageUpdate(slot, 0, [list(range(slot * self.pages, (slot + 1) * self.pages))])
        return self._plan([Row(slot, 0, tokens, sample=True)], [init], [pages])

    def prefill_plan(self, slot: int, tokens: int, adapter: int = NOBODY) -> Plan:
        """Return the plan of a prompt of `tokens` tokens, with an adapter slot."""
        init = SlotInit(
            slot=slot,
            tokens=prompt_of(slot, tokens, self.worker.capacity.vocab_size),
            prompt_tokens=tokens,
            choice=0,
            sampling=SamplingParams(max_new_tokens=1 << 20, temperature=0.0),
            adapter=adapter,
        )
        return self.init_plan(init)

    def decode_plan(self, slots: int) -> Plan:
        """Return the plan of a token for each of the first slots."""
        return self.chained_plan(dict.fromkeys(range(slots), ()))

    def chained_plan(self, assumed: Mapping[int, Sequence[int]], right: int = 0) -> Plan:
        """Return the plan of a token for some slots, and of one for each draft token after it.

        Rows are ordered as in the core. Slots advance as if `right` draft tokens were accepted.
        """
        rows = [Row(slot, self.lengths[slot], 1, sample=True) for slot in assumed]
        tokens: dict[int, int] = {}
        for slot, guesses in assumed.items():
            for place, token in enumerate(guesses, self.lengths[slot] + 1):
                tokens[len(rows)] = token
                rows.append(Row(slot, place, 1, sample=True))
            self.lengths[slot] += 1 + right
        return self._plan(rows, draft_tokens=tokens)

    def prefill(self, slot: int, tokens: int, adapter: int = NOBODY) -> float:
        """Return the seconds of one slot's prompt."""
        plan = self.prefill_plan(slot, tokens, adapter)
        start = time.perf_counter()
        self.worker.submit(plan).result()
        return time.perf_counter() - start

    def rewind(self, tokens: int) -> None:
        """Continue from `tokens`: later tokens are computed again, with equal results."""
        self.lengths = [tokens] * len(self.lengths)

    def decode(self, slots: int, steps: int) -> tuple[list[float], list[list[int]]]:
        """Return (seconds between results, tokens of each step); steps start before the last one's result."""
        return self.run(partial(self.decode_plan, slots), steps)

    def run(self, plan: Callable[[], Plan], steps: int, *, ahead: bool = True) -> tuple[list[float], list[list[int]]]:
        """Return (seconds between results, tokens of each step); with `ahead`, steps start before the last result."""
        waiting: deque[Pending[StepResult]] = deque()
        seconds, tokens = [], []
        last = time.perf_counter()
        for step in range(steps):
            while len(waiting) < min(1 + ahead, steps - step):
                waiting.append(self.worker.submit(plan()))
            tokens.append(waiting.popleft().result().token_ids)
            now = time.perf_counter()
            seconds.append(now - last)
            last = now
        return seconds, tokens

    def _plan(
        self,
        rows: list[Row],
        inits: Sequence[SlotInit] = (),
        pages: Sequence[PageUpdate] = (),
        draft_tokens: Mapping[int, int] | None = None,
    ) -> Plan:
        self._step += 1
        return Plan(
            step=self._step, introduce=[*inits], pages=[*pages], rows=rows, draft_tokens=dict(draft_tokens or {})
        )


def prompt_of(text: int, tokens: int, vocab: int) -> bytes:
    """Return `tokens` tokens of one of many texts."""
    return pack_ints((7919 * text + 31 * place) % vocab for place in range(tokens))


class TimedModel:
    """Model that sums the seconds in which the host was busy with it."""

    def __init__(self, model: Model, graphs: Replays | None) -> None:
        self._model = model
        self._graphs = graphs
        self.seconds = 0.0

    def __call__(self, input_ids: torch.Tensor, positions: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        """See `Model`."""
        return self._timed(lambda: self._model(input_ids, positions, batch))

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """See `Model`."""
        return self._timed(lambda: self._model.compute_logits(hidden))

    def replay(self, inputs: StepInputs, *, adapted: bool = False) -> torch.Tensor | None:
        """See `Replays`."""
        graphs = self._graphs
        return None if graphs is None else self._timed(lambda: graphs.replay(inputs, adapted=adapted))

    def replay_sampling(self, inputs: StepInputs, *, adapted: bool = False) -> torch.Tensor | None:
        """See `Replays`. Sampling is not the model's."""
        return None if self._graphs is None else self._graphs.replay_sampling(inputs, adapted=adapted)

    def capture_next(self) -> bool:
        """See `Replays`."""
        return self._graphs is not None and self._graphs.capture_next()

    def _timed(self, run: Callable[[], Given]) -> Given:
        start = time.perf_counter()
        try:
            return run()
        finally:
            self.seconds += time.perf_counter() - start


def time_model(worker: TpModelWorker) -> TimedModel:
    """Wrap a worker's model and its recorded graphs with a clock."""
    runner = worker._runner
    timed = TimedModel(runner._model, runner.graphs)
    runner._model = timed
    runner.graphs = runner.graphs and timed
    return timed


@dataclass
class Turn:
    """Seconds of the host in one turn of the scheduler's loop, without those of the model."""

    plan: float
    submit: float
    finish: float

    @property
    def outside(self) -> float:
        """Return the sum."""
        return self.plan + self.submit + self.finish


@dataclass
class Decoding:
    """Real core with a worker: choices decode and do not end during the measurement."""

    worker: TpModelWorker
    batch: int
    prompt: int
    output: int
    core: Scheduler = field(init=False)
    in_flight: deque[Pending[StepResult]] = field(default_factory=deque)

    def __post_init__(self) -> None:
        """Submit the requests, and prefill until all choices decode."""
        budget = max(self.batch, 8192)
        self.core = Scheduler(CoreConfig(token_budget=budget), self.worker.capacity)
        lengths = (self.prompt, self.prompt), (self.output, self.output)
        for number, (ids, output) in enumerate(random_requests(self.batch, *lengths, self.worker.capacity.vocab_size)):
            asked = request(f"frontend-0-{number:022d}", ids, max_new_tokens=output, ignore_eos=True, temperature=0.8)
            self.core.handle(Arrival("frontend-0", asked))
        while True:
            plan = self.core.schedule()
            if plan is None:
                raise RuntimeError("the choices ended before all of them decoded")
            self.core.commit(self.worker.submit(plan).result())
            if len(plan.rows) == self.batch and all(row.count == 1 for row in plan.rows):
                break

    def overlapped(self, turns: int) -> None:
        """Run turns of the loop with `overlap` 1: the next step starts before the last one's result."""
        for _ in range(turns):
            if plan := self.core.schedule():
                self.in_flight.append(self.worker.submit(plan))
            if len(self.in_flight) > 1 or not plan:
                self.core.commit(self.in_flight.popleft().result())

    def timed(self, model: TimedModel) -> Turn:
        """Run one turn without overlap, so that waiting for the device does not count."""
        start, model.seconds = time.perf_counter(), 0.0
        plan = self.core.schedule()
        planned = time.perf_counter()
        if plan is None:
            raise RuntimeError("the choices ended while they were timed")
        pending = self.worker.submit(plan)
        submitted = time.perf_counter()
        wait()
        begin = time.perf_counter()
        self.core.commit(pending.result())
        return Turn(planned - start, submitted - planned - model.seconds, time.perf_counter() - begin)


def wait() -> None:
    """Wait until the device has finished."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
