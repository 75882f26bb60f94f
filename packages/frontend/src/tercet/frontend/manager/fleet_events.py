"""Events of schedulers and detokenizers, for an operator who watches: deaths, departures, re-dispatches."""

from collections import Counter, deque
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import NamedTuple

import msgspec

from tercet.frontend.manager.counters import Counters
from tercet.frontend.routing.dispatcher import Cause
from tercet.frontend.routing.peers import DetokenizerPeer, PeerRegistry, SchedulerPeer
from tercet.protocol.messages.values import Role

Part = SchedulerPeer | DetokenizerPeer
_LOADING = "loading"
_MAX_EVENTS = 64
"""Number of the latest events that are kept."""


class FleetEvent(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Change of a peer's state, or requests that were dispatched again."""

    number: int
    at: float
    """Seconds since the epoch."""
    kind: str
    """`connected`, a state of `state_of`, `died`, `left`, `redispatched` or `recovered`."""
    peer: str = ""
    role: Role | None = None
    cause: Cause | None = None
    count: int = 0
    """Number of requests."""


class _Known(NamedTuple):
    """Peer at the last observation."""

    role: Role
    incarnation: str
    state: str


def state_of(peer: Part) -> str:
    """Return `stuck`, `draining`, `ready` or `loading`."""
    if peer.stuck:
        return "stuck"
    if peer.leaving:
        return "draining"
    return "ready" if peer.ready else _LOADING


class FleetEvents:
    """The latest events, found by comparing the fleet and the counters with those of the last observation."""

    def __init__(self, fleet: PeerRegistry, counters: Counters) -> None:
        self._fleet = fleet
        self._counters = counters
        self._known: dict[str, _Known] = {}
        self._deaths: Counter[Role] = Counter()
        self._redispatches: Counter[Cause] = Counter()
        self._recovered = 0
        self._number = 0
        self.latest: deque[FleetEvent] = deque(maxlen=_MAX_EVENTS)

    def observe(self, at: float) -> list[FleetEvent]:
        """Return the events since the last observation, and keep them. `at` is the time of the day."""
        parts: Iterable[Part] = chain(self._fleet.schedulers.values(), self._fleet.detokenizers.values())
        known = {each.peer: _known(each) for each in parts}
        if known == self._known and not self._has_counted():
            return []
        found = [*self._lost(known), *self._changed(known), *self._counted()]
        events = [FleetEvent(number=number, at=at, **each) for number, each in enumerate(found, self._number)]  # type: ignore[arg-type]
        self._number += len(events)
        self._known = known
        self._deaths, self._redispatches = Counter(self._counters.deaths), Counter(self._counters.redispatches)
        self._recovered = self._counters.resumed_finished
        self.latest.extend(events)
        return events

    def _has_counted(self) -> bool:
        counters = self._counters
        return (
            counters.resumed_finished != self._recovered
            or counters.redispatches != self._redispatches
            or counters.deaths != self._deaths
        )

    def _lost(self, known: dict[str, _Known]) -> Iterator[dict[str, object]]:
        """Yield the peers that are gone or have another incarnation. Of several at once, the first ones died."""
        deaths = Counter(self._counters.deaths)
        deaths.subtract(self._deaths)
        for peer, before in self._known.items():
            now = known.get(peer)
            if now is None or now.incarnation != before.incarnation:
                died = deaths[before.role] > 0
                deaths[before.role] -= died
                yield {"kind": "died" if died else "left", "peer": peer, "role": before.role}

    def _changed(self, known: dict[str, _Known]) -> Iterator[dict[str, object]]:
        for peer, now in known.items():
            before = self._known.get(peer)
            if before is None or before.incarnation != now.incarnation:
                yield {"kind": "connected", "peer": peer, "role": now.role}
                if now.state == _LOADING:
                    continue
            elif before.state == now.state:
                continue
            yield {"kind": now.state, "peer": peer, "role": now.role}

    def _counted(self) -> Iterator[dict[str, object]]:
        for cause, count in self._counters.redispatches.items():
            if more := count - self._redispatches[cause]:
                yield {"kind": "redispatched", "cause": cause, "count": more}
        if more := self._counters.resumed_finished - self._recovered:
            yield {"kind": "recovered", "count": more}


def _known(peer: Part) -> _Known:
    role = Role.SCHEDULER if isinstance(peer, SchedulerPeer) else Role.DETOKENIZER
    return _Known(role, peer.incarnation, state_of(peer))
