"""Fair queue that gives every flow an equal share of the worker threads.

The flow with the lowest served cost goes next, as in the scheduler's `fair` policy for tenants ("Fairness in Serving
Large Language Models", Sheng et al., OSDI 2024). A flow that becomes active is lifted to the lowest counter of the
active flows, so that idle flows accumulate no credit.
"""

from collections import deque
from collections.abc import Callable
from typing import Generic, NamedTuple, TypeVar

_T = TypeVar("_T")


class Flow(NamedTuple):
    """Queue key: the short or the long texts of one API key."""

    owner: str
    long: bool = False


class FairQueue(Generic[_T]):
    """Fair queue of items with a cost; FIFO within a flow."""

    def __init__(self) -> None:
        self._waiting: dict[Flow, deque[tuple[_T, int]]] = {}
        self._served: dict[Flow, int] = {}
        self._last = 0
        """Counter of the flow that was served last."""

    def __len__(self) -> int:
        return sum(map(len, self._waiting.values()))

    def add(self, flow: Flow, item: _T, cost: int) -> None:
        """Append an item to its flow."""
        if flow not in self._waiting:
            level = min((self._served[each] for each in self._waiting), default=self._last)
            kept = {each: served for each, served in self._served.items() if each in self._waiting or served > level}
            self._served = {**kept, flow: max(level, kept.get(flow, 0))}
            self._waiting[flow] = deque()
        self._waiting[flow].append((item, cost))

    def pop(self, eligible: Callable[[Flow], bool]) -> _T | None:
        """Remove and return the next item of the least-served flow among those for which `eligible` is true."""
        flows = [flow for flow in self._waiting if eligible(flow)]
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
        """Remove a queued item, if it is still there."""
        waiting = self._waiting.get(flow, deque())
        found = next((each for each in waiting if each[0] == item), None)
        if found is not None:
            waiting.remove(found)
            if not waiting:
                del self._waiting[flow]
