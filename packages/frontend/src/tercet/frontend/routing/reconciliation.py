"""Comparison of heartbeats with this frontend's requests, which detects every lost message.

The list in a heartbeat is a snapshot from up to 0.25 s earlier, or from before the running step, so a single heartbeat
proves nothing. A choice must look wrong in two counted heartbeats with no output in between. After each redispatch for
this reason, the required number doubles.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from tercet.frontend.routing.dispatcher import Cause
from tercet.frontend.routing.request_state import RequestState
from tercet.protocol.messages.messages import AbortReq, Heartbeat
from tercet.protocol.messages.values import Held, Phase, unpack_ints

MIN_INTERVAL = 0.2
"""Minimum seconds between counted heartbeats; several that were queued and arrive together count once."""
SETTLE_SECONDS = 0.3
"""Seconds after a dispatch in which heartbeats are ignored for the request."""
MISSES_UNTIL_LOST = 2
MAX_DOUBLINGS = 5

Key = tuple[str, int]
"""(rid, choice index)"""


@dataclass
class Findings:
    """Consequences of one heartbeat."""

    lost: list[tuple[RequestState, Cause]] = field(default_factory=list)
    """Requests to redispatch."""
    orphans: list[AbortReq] = field(default_factory=list)
    """Aborts for choices that the peer holds although no request here needs them."""


@dataclass
class _Watch:
    """Suspicious choice, since the first heartbeat at which it looked wrong at this attempt and position."""

    attempt: int
    position: int
    steps: int
    misses: int = 0


@dataclass
class _Snapshot:
    """Last counted heartbeat of a peer."""

    at: float
    watches: dict[Key, _Watch]
    orphans: set[Key]


class Reconciler:
    """Stateless towards requests: it only returns findings. `now` is any monotonic clock in seconds."""

    def __init__(self) -> None:
        self._snapshots: dict[str, _Snapshot] = {}

    def forget(self, peer: str) -> None:
        self._snapshots.pop(peer, None)

    def detokenizer(self, peer: str, heartbeat: Heartbeat, states: Mapping[str, RequestState], now: float) -> Findings:
        """Return the orphans that a detokenizer holds. Choices that it lost show as missing output of the scheduler.

        Raises ValueError for an inconsistent list.
        """
        last = self._snapshots.get(peer)
        if last is not None and now - last.at < MIN_INTERVAL:
            return Findings()
        orphans = set[Key]()
        for key in _table(heartbeat.held):
            state = states.get(key[0])
            if state is None or state.detokenizer != peer or state.done or key[1] not in state.open_indices:
                orphans.add(key)
        self._snapshots[peer] = _Snapshot(now, {}, orphans)
        return Findings(orphans=_aborts(orphans & last.orphans if last is not None else ()))

    def scheduler(self, peer: str, heartbeat: Heartbeat, states: Mapping[str, RequestState], now: float) -> Findings:
        """Return the choices that a scheduler lost, and the orphans that it holds.

        Raises ValueError for an inconsistent list.
        """
        last = self._snapshots.get(peer)
        if last is not None and now - last.at < MIN_INTERVAL:
            return Findings()
        unclaimed = _table(heartbeat.held)
        findings = Findings()
        watches: dict[Key, _Watch] = {}
        earlier = last.watches if last is not None else {}
        for state in states.values():
            if state.scheduler != peer or state.done:
                continue
            settled = now - state.dispatched_at >= SETTLE_SECONDS
            causes = set[Cause]()
            for index in state.open_indices:
                here = unclaimed.pop((state.rid, index), None)
                position = state.position(index)
                if not settled or (here is not None and here[0] == state.attempt and here[1] <= position):
                    continue
                watch = watches[state.rid, index] = _watch(earlier, state, index, position, heartbeat.steps)
                cause = _count_miss(watch, here, heartbeat)
                if cause is not None and watch.misses >= MISSES_UNTIL_LOST << min(state.retries, MAX_DOUBLINGS):
                    causes.add(cause)
            if causes:
                findings.lost.append((state, min(causes)))
        orphans = set(unclaimed)
        findings.orphans = _aborts(orphans & last.orphans if last is not None else ())
        self._snapshots[peer] = _Snapshot(now, watches, orphans)
        return findings


def _table(held: Held) -> dict[Key, tuple[int, int]]:
    """Return (attempt, next position) by choice."""
    indices, attempts, positions = map(unpack_ints, (held.indices, held.attempts, held.positions))
    keys, values = zip(held.rids, indices, strict=True), zip(attempts, positions, strict=True)
    return dict(zip(keys, values, strict=True))


def _watch(earlier: Mapping[Key, _Watch], state: RequestState, index: int, position: int, steps: int) -> _Watch:
    """Return the watch of a choice, or a new one if its attempt or position has changed."""
    watch = earlier.get((state.rid, index))
    if watch is None or (watch.attempt, watch.position) != (state.attempt, position):
        return _Watch(state.attempt, position, steps)
    return watch


def _count_miss(watch: _Watch, here: tuple[int, int] | None, heartbeat: Heartbeat) -> Cause | None:
    """Count a miss if the choice looks wrong, and return the cause."""
    if here is not None and here[0] == watch.attempt:
        watch.misses += 1
        return Cause.SILENT
    # A busy scheduler reports its state before the step; two finished steps prove that it has read its inbox.
    idle = heartbeat.step_age == 0 and heartbeat.phase not in (Phase.STEP, Phase.COMPILING)
    if not idle and heartbeat.steps < watch.steps + 2:
        return None
    watch.misses += 1
    return Cause.ABSENT


def _aborts(keys: Iterable[Key]) -> list[AbortReq]:
    indices: dict[str, list[int]] = {}
    for rid, index in sorted(keys):
        indices.setdefault(rid, []).append(index)
    return [AbortReq(rid=rid, indices=each, reason="nobody waits for it") for rid, each in indices.items()]
