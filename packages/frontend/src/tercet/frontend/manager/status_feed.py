"""Live status of all parts, for viewers: one frame at each tick, shared by viewers with the same rights.

Schedulers are asked for their internal state only while there is a viewer. A frame has no prompts, texts, token ids or
request ids.
"""

import asyncio
import hashlib
import secrets
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterable
from typing import Any

import msgspec

from tercet.frontend.errors import RateLimitError
from tercet.frontend.http.auth import Caller
from tercet.frontend.manager.fleet_events import FleetEvent, FleetEvents, state_of
from tercet.frontend.manager.request_table import RequestTable
from tercet.frontend.routing.model_registry import ModelRegistry
from tercet.frontend.routing.peers import DetokenizerPeer, SchedulerPeer
from tercet.protocol.messages.internal_state import ChoiceRow
from tercet.protocol.messages.messages import GetInternalStateReq, InternalState
from tercet.protocol.node import Sender

MAX_VIEWERS = 16
MAX_VIEWERS_PER_KEY = 4
_MAX_ROWS = 320
"""Maximum number of choices, and of prefixes, that are shown of one scheduler."""
_TENANT_DIGITS = 8

_encode = msgspec.json.Encoder().encode


class View(msgspec.Struct, frozen=True):
    """Rights of a viewer: everything, or its own choices beside the totals of all."""

    tenant: str
    everything: bool
    tenants: bool
    """Show the tenant of each choice."""


class StatusFeed:
    """Status frames for viewers. All methods run on the event loop's thread."""

    def __init__(self, outbox: Sender, models: ModelRegistry, requests: RequestTable) -> None:
        self._outbox = outbox
        self._models = models
        self._requests = requests
        self._fleet = requests.dispatcher.peers
        self.events = FleetEvents(self._fleet, requests.counters)
        self._viewers: Counter[str] = Counter()
        self._admins = 0
        """Viewers with an admin key."""
        self._states: dict[str, tuple[str, InternalState]] = {}
        """By scheduler: its incarnation, and its latest state."""
        self._new_events: list[FleetEvent] = []
        self._frames: dict[View, bytes] = {}
        """Frames of the latest tick, each made for its first viewer."""
        self._ticked = asyncio.Event()
        self._key = secrets.token_bytes(16)
        """Key of the hashes that stand for request ids."""

    # Viewers.

    def view_of(self, caller: Caller) -> View:
        """Return the rights of a caller. A server without API keys shows everything to everyone."""
        tenant = "" if caller.admin else self._requests.quota.tenant()
        return View(tenant, everything=caller.admin or not caller.owner, tenants=caller.admin)

    def join(self, caller: Caller) -> None:
        """Count a viewer, who must `leave`. Raises RateLimitError if there are too many."""
        most = MAX_VIEWERS_PER_KEY if caller.owner else MAX_VIEWERS
        others = self._viewers.total() - self._admins
        if self._viewers[caller.owner] >= most or (others >= MAX_VIEWERS and not caller.admin):
            raise RateLimitError("Too many viewers watch the status: close another one.", retry_after=5)
        if not self._viewers.total():
            self._request_states()
        self._viewers[caller.owner] += 1
        self._admins += caller.admin

    def leave(self, caller: Caller) -> None:
        """Remove a viewer that joined."""
        self._viewers[caller.owner] -= 1
        self._admins -= caller.admin
        self._viewers += Counter()  # drop keys without viewers

    async def frames(self, view: View) -> AsyncIterator[bytes]:
        """Yield a frame with the latest events, then one at each tick. A slow viewer misses frames."""
        yield self._frame(view, self.events.latest)
        while True:
            await self._ticked.wait()
            if view not in self._frames:
                self._frames[view] = self._frame(view, self._new_events)
            yield self._frames[view]

    # Updates.

    def tick(self) -> None:
        """Observe the fleet and, for viewers, request the states of schedulers and make the next frames."""
        self._new_events = self.events.observe(time.time())
        if not self._viewers:
            self._states.clear()
            return
        self._states = {peer: state for peer, state in self._states.items() if self._is_current(peer, state[0])}
        self._request_states()
        self._frames = {}
        self._ticked.set()
        self._ticked = asyncio.Event()

    def on_state(self, source: str, state: InternalState) -> None:
        """Keep a scheduler's state for the next frame."""
        scheduler = self._fleet.schedulers.get(source)
        if scheduler is not None and self._viewers:
            self._states[source] = scheduler.incarnation, state

    def _is_current(self, peer: str, incarnation: str) -> bool:
        scheduler = self._fleet.schedulers.get(peer)
        return scheduler is not None and scheduler.incarnation == incarnation

    def _request_states(self) -> None:
        for peer, scheduler in self._fleet.schedulers.items():
            if scheduler.ready:
                self._outbox.send(peer, GetInternalStateReq(id="status"))

    # Frames.

    def _frame(self, view: View, events: Iterable[FleetEvent]) -> bytes:
        counters, dispatcher = self._requests.counters, self._requests.dispatcher
        return _encode(
            {
                "at": time.time(),
                "everything": view.everything,
                "frontend": {
                    "peer": self._requests.peer,
                    "running": len(self._requests),
                    "waiting": dispatcher.waiting,
                    "ended": counters.outcomes,
                    "recovered": counters.resumed_finished,
                },
                "deaths": counters.deaths,
                "redispatches": counters.redispatches,
                "models": [{"name": each.name, "context_length": each.context} for each in self._models],
                "schedulers": [self._scheduler(view, each) for each in self._fleet.schedulers.values()],
                "detokenizers": [_detokenizer(each) for each in self._fleet.detokenizers.values()],
                "events": list(events),
            }
        )

    def _scheduler(self, view: View, scheduler: SchedulerPeer) -> dict[str, Any]:
        heartbeat = scheduler.heartbeat
        _, state = self._states.get(scheduler.peer, ("", None))
        shown: dict[str, Any] = {
            "peer": scheduler.peer,
            "incarnation": scheduler.incarnation,
            "model": self._models.name_of(scheduler),
            "encoder": scheduler.encoder is not None,
            "state": state_of(scheduler),
            "phase": heartbeat.phase,
            "steps": heartbeat.steps,
            "step_age": heartbeat.step_age,
            "step_seconds": heartbeat.step_seconds,
            "load": state.load if state else scheduler.load,
            "choices": None,
            "prefixes": None,
        }
        if state is not None:
            rows = [each for each in state.choices if view.everything or each.tenant == view.tenant]
            shown["choices"] = [self._choice(view, each) for each in rows[:_MAX_ROWS]]
            shown["prefixes"] = state.prefixes[:_MAX_ROWS] if view.everything else None
        return shown

    def _choice(self, view: View, row: ChoiceRow) -> dict[str, Any]:
        shown = msgspec.structs.asdict(row)
        name = f"{shown.pop('frontend')}\0{shown.pop('rid')}\0{row.index}"
        shown["id"] = hashlib.blake2s(name.encode(), digest_size=5, key=self._key).hexdigest()
        shown["tenant"] = row.tenant[:_TENANT_DIGITS] if view.tenants else ""
        return shown


def _detokenizer(detokenizer: DetokenizerPeer) -> dict[str, Any]:
    return {
        "peer": detokenizer.peer,
        "incarnation": detokenizer.incarnation,
        "state": state_of(detokenizer),
        "choices": detokenizer.load.running,
    }
