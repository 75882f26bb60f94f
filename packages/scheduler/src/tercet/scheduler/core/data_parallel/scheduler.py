"""Core of a model whose attention ranks each have the slots and the KV cache of their own requests.

It has a `Scheduler` for each rank, and has the same interface. A request stays on the rank to which it is assigned at
arrival. All ranks compute a step together, because they have parts of the same experts: their plans become one.
"""

from collections import deque

import msgspec

from tercet.protocol.backlog import Outgoing
from tercet.protocol.messages.internal_state import ChoicePhase
from tercet.protocol.messages.messages import (
    ControlReply,
    FlushCacheReq,
    InternalState,
    TokenizedEmbeddingReqInput,
    TokenizedGenerateReqInput,
)
from tercet.protocol.messages.values import Grammar, Held, Load, LoRAAdapter
from tercet.scheduler.core.config import CoreConfig
from tercet.scheduler.core.data_parallel.plans import merged_plan, results_of
from tercet.scheduler.core.events import Arrival, MaskReady, MediaReceived
from tercet.scheduler.core.plan import Capacity, Plan, StepResult
from tercet.scheduler.core.request import namespace_of
from tercet.scheduler.core.scheduler import Scheduler

_UNEVEN = 4
"""A rank with a longer cached prefix may have 1 / _UNEVEN of its slots more choices than another."""
_SUMMED = [each.name for each in msgspec.structs.fields(Load) if each.type is int and each.name != "page_size"]


class DataParallelScheduler:
    """Continuous batching over several attention ranks, each with a core of its own."""

    def __init__(self, config: CoreConfig, capacity: Capacity) -> None:
        """Create the cores. `capacity` is that of each rank, and so is the token budget of `config`."""
        self.config = config
        self.capacity = capacity
        ranks = config.attention_ranks
        own = msgspec.structs.replace(config, attention_ranks=1, max_queued=-(-config.max_queued // ranks))
        self.cores = [Scheduler(own, capacity) for _ in range(ranks)]
        self.in_flight: deque[list[Plan | None]] = deque()
        """The plan of each rank, for every step in flight."""
        self._steps = 0
        self._exclusive: set[tuple[str, str]] = set()
        """(frontend, rid) of requests that are to run while no other runs."""

    @property
    def runnable(self) -> bool:
        """Return whether `schedule` might have a plan."""
        alone = self._alone()
        return any(core.runnable for core in self.cores) if alone is None else alone.runnable

    @property
    def empty(self) -> bool:
        """Return whether no request is held."""
        return all(core.empty for core in self.cores)

    def handle(self, *arrivals: Arrival) -> list[Outgoing]:
        """Handle messages. Return the answers that are known at once."""
        outgoing: list[Outgoing] = []
        for arrival in arrivals:
            match arrival.message:
                case TokenizedGenerateReqInput() as request:
                    if request.exclusive or request.deferred:
                        self._exclusive.add((arrival.source, request.rid))
                    outgoing += self._core_for(arrival.source, request).handle(arrival)
                case TokenizedEmbeddingReqInput() | MediaReceived():
                    outgoing += self.cores[0].handle(arrival)
                case MaskReady(slot=slot, step=step):
                    rank, own = divmod(slot, self.capacity.slots)
                    outgoing += self.cores[rank].handle(arrival._replace(message=MaskReady(own, step)))
                case FlushCacheReq(id=number):
                    freed = sum(core.memory.flush() for core in self.cores)
                    outgoing.append((arrival.source, ControlReply(id=number, ok=True, message=f"{freed} pages freed")))
                case _:
                    outgoing += _answered_once([core.handle(arrival) for core in self.cores])
        return outgoing

    def schedule(self, now: float = 0.0) -> Plan | None:
        """Plan the next step of all ranks, if there is one. All change weights or memory in the same step."""
        weights = all(core.loads_weights for core in self.cores)
        changes = weights or self.cores[0].occupation.due
        alone = None if changes else self._alone()
        if self.in_flight and (changes or alone is not None):
            return None
        plans = self._plans(now, alone, weights=weights)
        if not (any(plans) or self.in_flight or changes) and (alone := self._alone()) is not None:
            plans = self._plans(now, alone)  # choices beside an exclusive request may have been retracted
        if not any(plans):
            return None
        self._steps += 1
        self.in_flight.append(plans)
        return merged_plan(plans, self.capacity.slots)

    def _plans(self, now: float, alone: Scheduler | None, *, weights: bool = False) -> list[Plan | None]:
        """Return the plan of each rank, or of one rank alone."""
        plans: list[Plan | None] = []
        for core in self.cores:
            core.steps, core.planner.shared = self._steps, core is not alone
            plans.append(core.schedule(now, weights=weights) if alone in (None, core) else None)
        return plans

    def commit(self, result: StepResult) -> list[Outgoing]:
        """Apply the result of the oldest plan in flight. Return its tokens and final answers."""
        plans = self.in_flight.popleft()
        rows = sum(len(plan.rows) for plan in plans if plan is not None)
        if len(result.token_ids) != rows:
            raise ValueError(f"result of step {result.step} has {len(result.token_ids)} rows, not {rows}")
        results = zip(self.cores, results_of(result, plans), strict=True)
        return _answered_once([core.commit(given) for core, given in results if given is not None])

    def held(self) -> dict[str, Held]:
        """Return the requests that this scheduler holds for each frontend, for its heartbeats."""
        whole: dict[str, Held] = {}
        for core in self.cores:
            for frontend, held in core.held().items():
                before = whole.get(frontend, Held())
                whole[frontend] = Held(
                    rids=before.rids + held.rids,
                    indices=before.indices + held.indices,
                    attempts=before.attempts + held.attempts,
                    positions=before.positions + held.positions,
                )
        return whole

    def grammars(self) -> set[Grammar]:
        """Return the grammars of held choices."""
        return {grammar for core in self.cores for grammar in core.grammars()}

    def adapters(self) -> set[LoRAAdapter]:
        """Return the adapters of held choices and of load requests."""
        return {adapter for core in self.cores for adapter in core.adapters()}

    def media(self) -> set[bytes]:
        """Return the hashes of the images and audio clips of held choices."""
        return {sha256 for core in self.cores for sha256 in core.media()}

    def load(self) -> Load:
        """Return the load of all ranks, which heartbeats report."""
        loads = [core.load() for core in self.cores]
        sums = {name: sum(getattr(load, name) for load in loads) for name in _SUMMED}
        return msgspec.structs.replace(loads[0], updating=any(load.updating for load in loads), **sums)

    def internal_state(self, number: str, now: float) -> InternalState:
        """Return the reply to a GetInternalStateReq. Its size is bounded, and so is the time that it takes."""
        rows = [row for core in self.cores for row in core.roster.rows(now)]
        rows.sort(key=lambda row: row.phase is ChoicePhase.WAITING)
        prefixes = [row for core in self.cores for row in core.memory.cache.largest()]
        return InternalState(id=number, load=self.load(), choices=rows, prefixes=prefixes)

    def _core_for(self, source: str, request: TokenizedGenerateReqInput) -> Scheduler:
        """Return the core that holds a request, or else the one that gets it.

        That is the one with the longest cached prefix, among those with about as few choices as any.
        """
        for core in self.cores:
            if core.roster.choices(source, request.rid):
                return core
        salt, key = namespace_of(request), bytes(request.input_ids)
        choices = [len(core.planner.running) + core.roster.queued for core in self.cores]
        most = min(choices) + max(1, self.capacity.slots // _UNEVEN)

        def rank(number: int) -> tuple[int, int, int]:
            memory = self.cores[number].memory
            return -memory.cache.measure(salt, key), choices[number], -memory.available

        return self.cores[min((number for number, count in enumerate(choices) if count <= most), key=rank)]

    def _alone(self) -> Scheduler | None:
        """Return the core whose exclusive request is the only one that may run now; None without such a request."""
        for source, rid in sorted(self._exclusive):
            for core in self.cores:
                if reqs := core.roster.choices(source, rid).values():
                    started = all(req.alone for req in core.planner.running)
                    if started and any((req.alone or req.offered) and not core.planner.is_blocked(req) for req in reqs):
                        return core
                    break
            else:
                self._exclusive.remove((source, rid))
        return None


AnyScheduler = Scheduler | DataParallelScheduler


def core_of(config: CoreConfig, capacity: Capacity) -> AnyScheduler:
    """Return the core for a number of attention ranks, each of which has a capacity."""
    return Scheduler(config, capacity) if config.attention_ranks == 1 else DataParallelScheduler(config, capacity)


def cores_of(core: AnyScheduler) -> list[Scheduler]:
    """Return the core of each attention rank."""
    return core.cores if isinstance(core, DataParallelScheduler) else [core]


def _answered_once(of_cores: list[list[Outgoing]]) -> list[Outgoing]:
    """Return the messages of all cores. They answer a control request in the same way: the first answer is sent."""
    first, *others = of_cores
    return first + [each for outgoing in others for each in outgoing if not isinstance(each[1], ControlReply)]
