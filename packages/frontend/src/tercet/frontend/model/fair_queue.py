"""A queue of work that gives every flow an equal share of the threads that do it.

Start with whichever flow was given least, as the schedulers' `fair` policy does with tenants ("Fairness in Serving
Large Language Models", Sheng et al., OSDI 2024). A flow that begins to wait is lifted to the least counter of the flows
that wait already, so that no flow saves up.
"""

from collections import deque
from collections.abc import Callable
from typing import Generic, NamedTuple, TypeVar

_T = TypeVar("_T")


class Flow(NamedTuple):
    """Work of one API key that shares a place in the queue: its short texts, or its long ones."""

    owner: str
    long: bool = False


class FairLine(Generic[_T]):
    """Items by flow, each with a cost. Within a flow the first to come is the first to go."""

    def __init__(self) -> None:
        self._waiting: dict[Flow, deque[tuple[_T, int]]] = {}
        self._served: dict[Flow, int] = {}
        self._last = 0
        """The counter of the flow that was served last."""

    def __len__(self) -> int:
        return sum(map(len, self._waiting.values()))

    def add(self, flow: Flow, item: _T, cost: int) -> None:
        """Put an item at the end of its flow."""
        if flow not in self._waiting:
            level = min((self._served[each] for each in self._waiting), default=self._last)
            kept = {each: served for each, served in self._served.items() if each in self._waiting or served > level}
            self._served = {**kept, flow: max(level, kept.get(flow, 0))}
            self._waiting[flow] = deque()
        self._waiting[flow].append((item, cost))

    def take(self, may_go: Callable[[Flow], bool]) -> _T | None:
        """Remove and return the next item of the flow that was given least, of those that `may_go`."""
        flows = [flow for flow in self._waiting if may_go(flow)]
        if not flows:
            return None
        flow = min(flows, key=self._served.__getitem__)
        item, cost = self._waiting[flow].popleft()
        self._last = self._served[flow]
        self._served[flow] += cost
        if not self._waiting[flow]:
            del self._waiting[flow]
        return item

    def remove(self, flow: Flow, item: _T) -> None:
        """Remove an item that was not taken; do nothing where it is not there."""
        waiting = self._waiting.get(flow, deque())
        found = next((each for each in waiting if each[0] == item), None)
        if found is not None:
            waiting.remove(found)
            if not waiting:
                del self._waiting[flow]
