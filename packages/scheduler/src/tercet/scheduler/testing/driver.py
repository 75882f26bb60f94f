"""Driver of the core over a `FakeExecutor`: checks every invariant after every call and records all outputs."""

from collections import deque
from collections.abc import Sequence
from typing import Any

from tercet.protocol.backlog import Outgoing
from tercet.protocol.messages.audio import AudioInput, SoundInput
from tercet.protocol.messages.media import ImageInput
from tercet.protocol.messages.messages import BatchTokenIDOutput, FirstRow, Rejected, TokenizedGenerateReqInput
from tercet.protocol.messages.values import (
    FinishReason,
    FinishType,
    LogprobParams,
    LoRAAdapter,
    Resume,
    SamplingParams,
    pack_ints,
    unpack_floats,
    unpack_ints,
)
from tercet.scheduler.core.config import CoreConfig
from tercet.scheduler.core.events import Arrival, CoreMessage, MaskReady
from tercet.scheduler.core.invariants import violations
from tercet.scheduler.core.plan import Capacity, Plan, StepResult
from tercet.scheduler.core.scheduler import Scheduler
from tercet.scheduler.ports import Executor, Pending
from tercet.scheduler.testing.fake_executor import FakeExecutor, seen_tokens

FRONTEND = "frontend-0"
DETOKENIZER = "detokenizer-0"

_LONGEST_WAIT = 60.0

Choice = tuple[str, int]
"""(rid, index)"""


def request(
    rid: str,
    prompt: Sequence[int],
    *,
    attempt: int = 0,
    detokenizer: str = DETOKENIZER,
    resume: Sequence[Resume] = (),
    priority: int = 0,
    salt: str = "",
    tenant: str = "",
    alone: bool = False,
    hold: bool = False,
    logprobs: LogprobParams | None = None,
    lora: LoRAAdapter | None = None,
    prediction: Sequence[int] = (),
    images: Sequence[ImageInput] = (),
    audio: AudioInput | None = None,
    sounds: Sequence[SoundInput] = (),
    text: Sequence[int] = (),
    **sampling: Any,
) -> TokenizedGenerateReqInput:
    """Return a request in the form that a frontend sends."""
    return TokenizedGenerateReqInput(
        rid=rid,
        attempt=attempt,
        detokenizer=detokenizer,
        input_ids=pack_ints(prompt),
        sampling=SamplingParams(**{"max_new_tokens": 16, **sampling}),
        decode_spec=b"",
        resume=list(resume),
        priority=priority,
        cache_salt=salt,
        tenant=tenant,
        exclusive=alone,
        deferred=hold,
        logprobs=logprobs,
        lora=lora,
        prediction=pack_ints(prediction),
        images=list(images),
        audio=audio,
        sounds=list(sounds),
        encoder_ids=pack_ints(text),
    )


class Driver:
    """A core, its executor, and its recorded outputs.

    The driver acts as every frontend and detokenizer. Records are kept by rid and choice; those of a frontend other
    than FRONTEND by `frontend/rid`. A later attempt may repeat outputs of an earlier one.
    """

    def __init__(
        self,
        capacity: Capacity,
        config: CoreConfig | None = None,
        *,
        overlap: int = 0,
        executor: Executor | None = None,
    ) -> None:
        self.core = Scheduler(config or CoreConfig(token_budget=16), capacity)
        self.fake = executor if isinstance(executor, FakeExecutor) else FakeExecutor(capacity)
        """Oracle of every answer; it also runs the plans, unless another executor was given."""
        self.executor = self.fake if executor is None else executor
        self.overlap = overlap
        self.now = 0.0
        """Reading of the clock that the core gets with each call of `schedule`."""
        self.in_flight: deque[Pending[StepResult]] = deque()
        self.plans: list[Plan] = []
        self.output: dict[Choice, list[int]] = {}
        self.finishes: dict[Choice, FinishReason] = {}
        self.attempts: dict[Choice, int] = {}
        """Latest attempt that was seen or sent."""
        self.rejected: dict[str, Rejected] = {}
        self.others: list[Outgoing] = []
        self.logprobs: dict[Choice, dict[int, float]] = {}
        """Log-probabilities of output tokens, by position."""
        self.prompt_logprobs: dict[Choice, list[float]] = {}
        self.token_times: dict[Choice, list[float]] = {}
        self._frontends: dict[tuple[str, str, int, int], str] = {}

    def send(self, *messages: CoreMessage, source: str = FRONTEND) -> None:
        """Pass messages to the core. Rows of an attempt are ignored once its frontend has sent a later one."""
        for message in messages:
            if isinstance(message, TokenizedGenerateReqInput):
                rid = message.rid if source == FRONTEND else f"{source}/{message.rid}"
                for choice in message.resume:
                    self.attempts[rid, choice.index] = max(message.attempt, self.attempts.get((rid, choice.index), 0))
        self._take(self.core.handle(*(Arrival(source, message) for message in messages)))
        self.check()

    def step(self) -> bool:
        """Run one turn of the loop; return False if there was no work."""
        late = self.executor.late_masks
        if late is not None and late.busy:
            self.send(*(MaskReady(*each) for each in late.pop_ready()))
        plan = self.core.schedule(self.now)
        self.check()
        if plan is not None:
            self.plans.append(plan)
            self.in_flight.append(self.executor.submit(plan))
        if self.in_flight and (plan is None or len(self.in_flight) > self.overlap):
            self._take(self.core.commit(self.in_flight.popleft().result()))
            self.check()
            return True
        if plan is None and late is not None and late.busy:
            ready = late.pop_ready(_LONGEST_WAIT)
            self.send(*(MaskReady(*each) for each in ready))
            return bool(ready)
        return plan is not None

    def run(self, limit: int = 20_000) -> int:
        """Run turns until no work is left; return their number."""
        for turn in range(limit):
            if not self.step():
                return turn
        raise AssertionError(f"still busy after {limit} turns")

    def check(self) -> None:
        assert violations(self.core) == []

    def assert_empty(self) -> None:
        """Assert that no request or memory is held."""
        assert_empty(self.core)

    def expected(self, prompt: Sequence[int], count: int, choice: int = 0) -> list[int]:
        """Return the model's output after a prompt, including its end id."""
        return self.answer(request("", prompt, max_new_tokens=count), choice)

    def answer(self, wanted: TokenizedGenerateReqInput, choice: int = 0) -> list[int]:
        """Return the fake model's answer to a request, including the token that ends it."""
        sampling = wanted.sampling
        ends = {*sampling.stop_token_ids, *([] if sampling.ignore_eos else self.core.capacity.eos_token_ids)}
        prompt = seen_tokens(wanted.input_ids, wanted.images)
        output: list[int] = []
        while len(output) < sampling.max_new_tokens:
            must, complete = self.fake.follow([*prompt, *output], sampling)
            if complete:
                break
            suppressed = ends if len(output) < sampling.min_new_tokens else ()
            known = [*prompt, *output]
            seen = wanted.lora, wanted.audio, bytes(wanted.encoder_ids)
            output.append(must[0] if must else self.fake.next_token(known, choice, suppressed, *seen))
            if output[-1] in ends and len(output) >= sampling.min_new_tokens:
                break
        return output

    def _take(self, outgoing: list[Outgoing]) -> None:
        for peer, message, *_ in outgoing:
            match message:
                case BatchTokenIDOutput():
                    self._rows(peer, message)
                case Rejected():
                    assert message.rid not in self.rejected
                    self.rejected[message.rid] = message
                case _:
                    self.others.append((peer, message))

    def _rows(self, peer: str, batch: BatchTokenIDOutput) -> None:
        offsets, ids = unpack_ints(batch.offsets), unpack_ints(batch.token_ids)
        openings = {opening.row: opening for opening in batch.openings}
        columns = (batch.rids, *map(unpack_ints, (batch.indices, batch.attempts, batch.positions)))
        for row, (rid, index, attempt, position) in enumerate(zip(*columns, strict=True)):
            key = self._opened(peer, rid, index, attempt, openings.get(row))
            given = ids[offsets[row] : offsets[row + 1]]
            closing = not given and row in batch.finishes and batch.finishes[row].type == FinishType.ABORT
            assert closing or attempt == self.attempts[key], f"{key} of attempt {attempt} goes on after a later one"
            if attempt < self.attempts[key]:
                continue
            tokens = self.output.setdefault(key, [])
            assert closing or position <= len(tokens), f"{key} skipped from {len(tokens)} to {position}"
            tokens[position:] = list(given)
            if row in batch.logprobs:
                told = unpack_floats(batch.logprobs[row].chosen)
                assert len(told) == len(given)
                self.logprobs.setdefault(key, {}).update(enumerate(told, start=position))
            if row in batch.finishes:
                self.finishes[key] = batch.finishes[row]

    def _opened(self, peer: str, rid: str, index: int, attempt: int, opening: FirstRow | None) -> Choice:
        """Return the choice of a row. Exactly the first row of an attempt has a FirstRow, which names the frontend."""
        route = peer, rid, index, attempt
        assert (opening is None) == (route in self._frontends), f"{route} is opened never or twice"
        if opening is not None:
            self._frontends[route] = opening.frontend
        frontend = self._frontends[route]
        key = rid if frontend == FRONTEND else f"{frontend}/{rid}", index
        last = self.attempts.get(key, -1)
        if attempt < last:
            return key
        if attempt == last:
            assert key not in self.finishes, f"{key} got tokens after its final answer"
        self.attempts[key] = attempt
        self.finishes.pop(key, None)
        if opening is not None and opening.prompt_logprobs is not None:
            self.prompt_logprobs[key] = list(unpack_floats(opening.prompt_logprobs.chosen))
            self.token_times[key] = list(unpack_floats(opening.prompt_logprobs.times))
        return key


def assert_empty(core: Scheduler) -> None:
    """Assert that a core holds no request or memory."""
    memory = core.memory
    assert list(core.roster) == []
    assert not core.planner.running
    assert len(core.waiting) == 0
    assert len(memory.free_slots) == core.capacity.slots
    assert memory.pools.free + memory.cache.cached == memory.pools.total
    assert not memory.deferred_free
    if memory.states is not None:
        cached = 0 if memory.states.cache is None else memory.states.cache.snapshot_count
        assert len(memory.states.pool.free_pages) + cached == memory.states.pool.size
    if memory.windows is not None:
        windows = memory.windows
        nodes = [] if windows.cache is None else windows.cache.with_window
        assert not windows.holdings
        assert len(windows.pool.free_pages) + sum(len(node.window) for node in nodes) == windows.pool.size
    assert not memory.places.adapters.users
    assert not memory.places.audio.users
    assert not memory.places.texts.users
