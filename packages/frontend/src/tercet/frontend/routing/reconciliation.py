"""What a part's heartbeats say it holds, beside what this frontend believes it does: finds every lost message.

A heartbeat's list is a snapshot from up to a quarter of a second before it, or from before the step that runs. So
nothing follows from one heartbeat alone: a choice must look wrong in two that count, with nothing arriving in between,
and one that was dispatched again for this reason is given twice the time at each further try.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from tercet.frontend.routing.cause import Cause
from tercet.frontend.routing.request_state import RequestState
from tercet.protocol.messages.messages import AbortReq, Heartbeat
from tercet.protocol.messages.values import Held, Phase, unpack_ints

APART = 0.2
"""Seconds between heartbeats that count: some that waited in a queue and come together are one."""
SETTLE = 0.3
"""Seconds after a dispatch before heartbeats tell anything of it."""
STRIKES = 2
MOST_DOUBLINGS = 5

Key = tuple[str, int]
"""(rid, index)"""


@dataclass
class Findings:
    """What to do about one heartbeat."""

    lost: list[tuple[RequestState, Cause]] = field(default_factory=list)
    """Requests to dispatch again."""
    strangers: list[AbortReq] = field(default_factory=list)
    """What the part holds for nothing."""


@dataclass
class _Watch:
    """One open choice that looks wrong, from the first heartbeat at which it did at this attempt and position."""

    attempt: int
    position: int
    steps: int
    strikes: int = 0


@dataclass
class _Seen:
    """The last heartbeat of a peer that counted."""

    at: float
    watches: dict[Key, _Watch]
    strangers: set[Key]


class Reconciler:
    """Decides only; `now` is any monotonic clock in seconds."""

    def __init__(self) -> None:
        self._seen: dict[str, _Seen] = {}

    def forget(self, peer: str) -> None:
        """A part is gone."""
        self._seen.pop(peer, None)

    def detokenizer(self, peer: str, heartbeat: Heartbeat, states: Mapping[str, RequestState], now: float) -> Findings:
        """Find what a detokenizer holds for nothing. What it lacks shows at the scheduler: ahead, no arrivals."""
        last = self._seen.get(peer)
        if last is not None and now - last.at < APART:
            return Findings()
        strangers = set[Key]()
        for key in _table(heartbeat.held):
            state = states.get(key[0])
            if state is None or state.detokenizer != peer or state.done or key[1] not in state.open_indices:
                strangers.add(key)
        self._seen[peer] = _Seen(now, {}, strangers)
        return Findings(strangers=_aborts(strangers & last.strangers if last is not None else ()))

    def scheduler(self, peer: str, heartbeat: Heartbeat, states: Mapping[str, RequestState], now: float) -> Findings:
        """Find what a scheduler lacks and what it holds for nothing. Both raise ValueError for a list without sense."""
        last = self._seen.get(peer)
        if last is not None and now - last.at < APART:
            return Findings()
        unclaimed = _table(heartbeat.held)
        findings = Findings()
        watches: dict[Key, _Watch] = {}
        earlier = last.watches if last is not None else {}
        for state in states.values():
            if state.scheduler != peer or state.done:
                continue
            settled = now - state.dispatched_at >= SETTLE
            causes = set[Cause]()
            for index in state.open_indices:
                here = unclaimed.pop((state.rid, index), None)
                position = state.position(index)
                if not settled or (here is not None and here[0] == state.attempt and here[1] <= position):
                    continue
                watch = watches[state.rid, index] = _watch(earlier, state, index, position, heartbeat.steps)
                cause = _judge(watch, here, heartbeat)
                if cause is not None and watch.strikes >= STRIKES << min(state.retries, MOST_DOUBLINGS):
                    causes.add(cause)
            if causes:
                findings.lost.append((state, min(causes)))
        strangers = set(unclaimed)
        findings.strangers = _aborts(strangers & last.strangers if last is not None else ())
        self._seen[peer] = _Seen(now, watches, strangers)
        return findings


def _table(held: Held) -> dict[Key, tuple[int, int]]:
    """(attempt, next position) of every choice."""
    indices, attempts, positions = map(unpack_ints, (held.indices, held.attempts, held.positions))
    keys, told = zip(held.rids, indices, strict=True), zip(attempts, positions, strict=True)
    return dict(zip(keys, told, strict=True))


def _watch(earlier: Mapping[Key, _Watch], state: RequestState, index: int, position: int, steps: int) -> _Watch:
    """The watch kept on a choice, or a new one when it has moved since."""
    watch = earlier.get((state.rid, index))
    if watch is None or (watch.attempt, watch.position) != (state.attempt, position):
        return _Watch(state.attempt, position, steps)
    return watch


def _judge(watch: _Watch, here: tuple[int, int] | None, heartbeat: Heartbeat) -> Cause | None:
    """Count a strike for a choice that looks wrong, and say how."""
    if here is not None and here[0] == watch.attempt:
        watch.strikes += 1
        return Cause.SILENT
    # A scheduler that is busy tells of the time before; one that ended two steps since has looked into its inbox.
    idle = heartbeat.step_age == 0 and heartbeat.phase not in (Phase.STEP, Phase.COMPILING)
    if not idle and heartbeat.steps < watch.steps + 2:
        return None
    watch.strikes += 1
    return Cause.ABSENT


def _aborts(keys: Iterable[Key]) -> list[AbortReq]:
    indices: dict[str, list[int]] = {}
    for rid, index in sorted(keys):
        indices.setdefault(rid, []).append(index)
    return [AbortReq(rid=rid, indices=each, reason="nobody waits for it") for rid, each in indices.items()]
