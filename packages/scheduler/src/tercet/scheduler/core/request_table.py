"""Table of all choices that the core holds, and the end of a choice."""

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import islice

from tercet.protocol.messages.internal_state import ChoicePhase, ChoiceRow
from tercet.protocol.messages.values import FinishReason, FinishType, belongs
from tercet.scheduler.core.counters import CoreCounters
from tercet.scheduler.core.memory import KVMemory
from tercet.scheduler.core.outputs import Outputs
from tercet.scheduler.core.planner import Planner
from tercet.scheduler.core.request import Req
from tercet.scheduler.core.waiting.policy import SchedulePolicy
from tercet.scheduler.core.waiting.queue import WaitingQueue, room

_MAX_RUNNING_ROWS = 256
_MAX_WAITING_ROWS = 64
"""Maximum numbers of choices that `RequestTable.rows` describes."""


class RequestTable:
    """Choices by frontend, rid and index: waiting, following, or running.

    An ended choice stays until no plan names it. Frontends choose rids, so they are unique per frontend only.
    """

    def __init__(
        self, memory: KVMemory, policy: SchedulePolicy, waiting: WaitingQueue, planner: Planner, counters: CoreCounters
    ) -> None:
        self._memory = memory
        self._policy = policy
        self._waiting = waiting
        self._planner = planner
        self._counters = counters
        self._held: dict[tuple[str, str], dict[int, Req]] = {}
        self._following: Counter[str] = Counter()
        """Number of choices that follow another, by tenant."""

    def __iter__(self) -> Iterator[Req]:
        for choices in self._held.values():
            yield from choices.values()

    @property
    def queued(self) -> int:
        """Number of choices that wait, or follow one that computes their prompt."""
        return len(self._waiting) + self._following.total()

    def room(self, tenant: str, most: int) -> int:
        """Return how many more choices of a tenant may queue, if `most` of all tenants may."""
        return room(tenant, most - self.queued, self._waiting.tenants[tenant] + self._following[tenant])

    def choices(self, frontend: str, rid: str) -> dict[int, Req]:
        """Return the held choices of a frontend's request, by index."""
        return dict(self._held.get((frontend, rid), {}))

    def named(self, rid: str) -> list[Req]:
        """Return the choices of every frontend's request `rid`, of its siblings `rid.N`, or of all requests for ""."""
        return [req for req in self if not rid or belongs(req.rid, rid)]

    def rows(self, now: float) -> list[ChoiceRow]:
        """Describe the running choices, then waiting ones in order of arrival. Both have a limit."""
        running = islice(self._planner.running, _MAX_RUNNING_ROWS)
        waiting = islice(self._waiting, _MAX_WAITING_ROWS)
        return [_row(req, now) for reqs in (running, waiting) for req in reqs]

    def add(self, reqs: Sequence[Req]) -> None:
        """Add new choices of a request: one queues, the others follow it until it has computed their prompt."""
        for req in reqs:
            self._held.setdefault((req.frontend, req.rid), {})[req.index] = req
        if reqs:
            self._lead(list(reqs))

    def publish(self, req: Req, tokens: int) -> None:
        """Share the computed `tokens` of a choice, which include its whole prompt, and queue its followers.

        The followers get the places that they would have if they had waited beside it. If it is scored, so are they,
        because its log-probabilities are of their prompt, too.
        """
        req.published = True
        self._memory.publish(req, tokens)
        for follower in self._detach_followers(req):
            if req.scored and follower.to_score:
                follower.prompt_logprobs = list(req.prompt_logprobs)
                follower.scored = True
            self._waiting.add(follower, first=self._policy.goes_first(follower))

    def end(self, req: Req, finish: FinishReason, outputs: Outputs | None) -> None:
        """Give a choice its one final answer; without `outputs` there is no receiver."""
        req.finish = finish
        req.fast_path = False
        self._counters.finished += 1
        if outputs is not None:
            outputs.emit(req)
        if req in self._waiting:
            self._waiting.remove(req)
        elif req.leader is not None and req in req.leader.followers:
            req.leader.followers.remove(req)
            self._count_following(req.tenant, -1)
        self._policy.ended(req)
        if req.in_flight == 0:
            self.free(req)

    def free(self, req: Req) -> None:
        """Remove an ended choice that no plan in flight names; its computed tokens stay in the prefix cache.

        Its followers get a new leader, which queues.
        """
        if req.slot >= 0:
            del self._planner.running[req]
            self._memory.release(req, reuse=req.finish is None or req.finish.type != FinishType.ERROR)
        key = req.frontend, req.rid
        choices = self._held.get(key, {})
        if choices.get(req.index) is req:
            del choices[req.index]
            if not choices:
                del self._held[key]
        if followers := self._detach_followers(req):
            self._lead(followers)

    def _lead(self, reqs: list[Req]) -> None:
        leader, *followers = reqs
        leader.leader = None
        leader.followers = followers
        self._count_following(leader.tenant, len(followers))
        for follower in followers:
            follower.leader = leader
        self._waiting.add(leader, first=self._policy.goes_first(leader))

    def _detach_followers(self, leader: Req) -> list[Req]:
        """Remove and return a choice's followers; they were overtaken as often as it was."""
        followers, leader.followers = leader.followers, []
        for follower in followers:
            follower.times_skipped = leader.times_skipped
        self._count_following(leader.tenant, -len(followers))
        return followers

    def _count_following(self, tenant: str, more: int) -> None:
        self._following[tenant] += more
        if not self._following[tenant]:
            del self._following[tenant]


def _row(req: Req, now: float) -> ChoiceRow:
    running = ChoicePhase.DECODE if req.prefilled else ChoicePhase.PREFILL
    return ChoiceRow(
        frontend=req.frontend,
        rid=req.rid,
        index=req.index,
        attempt=req.attempt,
        tenant=req.tenant,
        phase=running if req.slot >= 0 else ChoicePhase.WAITING,
        age=now - req.arrived,
        prompt_tokens=req.prompt_tokens,
        cached_tokens=max(req.cached, 0),
        computed_tokens=req.computed,
        output_tokens=req.output_tokens,
        max_new_tokens=req.end - req.prompt_tokens,
        pages=len(req.pages[0]) if req.pages else 0,
        shared_pages=req.shared,
        constrained=req.constrained,
        lora=req.adapter is not None,
    )
