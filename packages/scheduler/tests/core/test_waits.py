"""How long choices waited: told with the first row of each attempt, from the times that the core is handed."""

from collections.abc import Iterable

from msgspec import structs

from tercet.protocol.backlog import Outgoing
from tercet.protocol.messages.messages import AbortReq, BatchTokenIDOutput, TokenizedGenerateReqInput
from tercet.protocol.messages.values import PrefillChunk, Resume, pack_ints
from tercet.scheduler.core.config import CoreConfig
from tercet.scheduler.core.events import Arrival, CoreMessage
from tercet.scheduler.core.scheduler import Scheduler
from tercet.scheduler.testing import FakeExecutor, request, small_capacity


class Watch:
    """A core whose steps are each a second, and the waits that it told, by rid, index and attempt."""

    def __init__(self, slots: int, pages: int = 64) -> None:
        capacity = small_capacity(slots=slots, pages=pages)
        self.core = Scheduler(CoreConfig(token_budget=16, reserve=0.1), capacity)
        self.executor = FakeExecutor(capacity)
        self.now = 100.0
        self.waits: dict[tuple[str, int, int], float | None] = {}
        self.chunks: dict[tuple[str, int, int], list[PrefillChunk]] = {}

    def send(self, *messages: CoreMessage, ago: float = 0.0) -> None:
        self._take(self.core.handle(*(Arrival("f", message, self.now - ago) for message in messages)))

    def run(self, steps: int = 500) -> None:
        for _ in range(steps):
            plan = self.core.schedule(self.now)
            if plan is None:
                return
            self.now += 1.0
            self._take(self.core.commit(self.executor.submit(plan).result()))

    def _take(self, outgoing: Iterable[Outgoing]) -> None:
        for _, message, *_ in outgoing:
            if isinstance(message, BatchTokenIDOutput):
                indices, attempts = memoryview(message.indices).cast("i"), memoryview(message.attempts).cast("i")
                for opening in message.openings:
                    key = message.rids[opening.row], indices[opening.row], attempts[opening.row]
                    self.waits[key] = opening.queue_time
                    self.chunks[key] = opening.chunks


def asked(rid: str, tokens: int = 4, **more: object) -> TokenizedGenerateReqInput:
    return request(rid, [ord(rid) - 90, 2, 3], max_new_tokens=tokens, ignore_eos=True, **more)  # type: ignore[arg-type]


def test_a_request_waits_from_when_it_came_until_a_step_has_it() -> None:
    watch = Watch(slots=1)
    watch.send(asked("a"), ago=0.25)
    watch.run(1)
    watch.send(asked("b"), ago=0.5)
    watch.run()
    assert watch.waits == {("a", 0, 0): 0.25, ("b", 0, 0): 3.5}


def test_choices_that_follow_wait_for_the_one_that_leads() -> None:
    watch = Watch(slots=4)
    watch.send(asked("a", n=2))
    watch.run()
    assert watch.waits == {("a", 0, 0): 0.0, ("a", 1, 0): 1.0}


def test_giving_up_its_pages_is_no_wait_and_a_later_attempt_tells_the_same() -> None:
    watch = Watch(slots=2, pages=8)
    watch.send(asked("a", 24), asked("b", 24), ago=2.0)
    watch.run(20)
    assert watch.core.counters.retractions
    [req] = [req for req in watch.core.roster if req.rid == "b"]
    resumed = [Resume(0, pack_ints(req.tokens[3 : 3 + req.sent]))]
    watch.send(asked("b", 24, attempt=1, resume=resumed))
    watch.run()
    assert watch.waits["a", 0, 0] == watch.waits["b", 0, 0] == watch.waits["b", 0, 1] == 2.0


def test_what_no_step_ever_had_tells_no_wait() -> None:
    watch = Watch(slots=1)
    watch.send(asked("a"))
    watch.run(2)
    watch.send(asked("b"))
    watch.run(1)
    watch.send(AbortReq(rid="b"))
    assert watch.waits == {("a", 0, 0): 0.0, ("b", 0, 0): None}


def test_a_traced_request_reports_the_steps_of_its_prompt() -> None:
    """A step has 16 tokens: the prompt of 40 takes three."""
    watch = Watch(slots=2)
    prompt = [1 + place % 20 for place in range(40)]
    traced = structs.replace(request("a", prompt, max_new_tokens=4, ignore_eos=True), traced=True)
    watch.send(traced, asked("b"), ago=0.5)
    watch.run()
    chunks = watch.chunks["a", 0, 0]
    assert sum(each.tokens for each in chunks) == 40
    assert len(chunks) >= 3
    times = [each.at for each in chunks]
    assert times[0] == watch.waits["a", 0, 0]
    assert times == [times[0] + step for step in range(len(times))]
    assert watch.chunks["b", 0, 0] == []


def test_the_time_changes_no_plan() -> None:
    plans = []
    for later in (0.0, 1e6):
        core, capacity = Scheduler(CoreConfig(), small_capacity()), small_capacity()
        executor = FakeExecutor(capacity)
        core.handle(*(Arrival("f", asked(rid), later) for rid in "abc"))
        made = []
        while plan := core.schedule(2 * later):
            made.append(plan)
            core.commit(executor.submit(plan).result())
        plans.append(made)
    assert plans[0] == plans[1]
