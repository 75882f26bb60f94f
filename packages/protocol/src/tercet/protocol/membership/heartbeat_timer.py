"""Timer of heartbeats: several a second while the node is active, fewer while it is idle.

The idle interval stays well below the peers' timeout, so a process that hangs is detected equally fast in both cases.
The active interval only refreshes the contents: choices held, and progress.

A process can send heartbeats and still be stuck in a step: `is_stuck` decides that for all receivers.
"""

from tercet.protocol.messages.messages import GetInternalStateReq, Heartbeat, InternalState, Message, MetricsReq, Series
from tercet.protocol.messages.values import Phase

IDLE_AFTER = 2.0
"""Seconds without activity after which the node counts as idle."""
_IDLE_FACTOR = 3
"""Idle interval, in active intervals."""
_MAX_IDLE_SHARE = 0.375
"""Longest idle interval, as a share of `silence`: two heartbeats may be lost or late."""

_STUCK_STEP = 30.0
"""Seconds without a sign of progress after which a step may count as stuck."""
_STUCK_FACTOR = 20.0
"""A step counts as stuck when its silence is also this many times the longest silence of an earlier step."""

_LONG_AGO = -1e9

_QUERIES = frozenset({GetInternalStateReq, InternalState, MetricsReq, Series})
"""Messages that read the state of a process. They cause no work, so they leave an idle node idle."""


def is_busy(heartbeat: Heartbeat) -> bool:
    """Return whether the sender has work or is about to have some."""
    load = heartbeat.load
    return heartbeat.phase is not Phase.IDLE or bool(load.running or load.queued or heartbeat.held.rids)


def is_activity(message: Message) -> bool:
    """Return whether a message that is sent or received is a sign of work."""
    if isinstance(message, Heartbeat):
        return is_busy(message)
    return type(message) not in _QUERIES


def is_stuck(heartbeat: Heartbeat) -> bool:
    """Return whether the sender's step has been silent for far longer than any earlier one and will not end.

    A slow step is not stuck: a step known to be long reports progress (`Heartbeat.step_age`).
    """
    in_step = heartbeat.phase in {Phase.STEP, Phase.DRAINING}
    return in_step and heartbeat.step_age > max(_STUCK_STEP, _STUCK_FACTOR * heartbeat.longest_step)


class HeartbeatTimer:
    """Time of the next heartbeat. Any thread may call `note_activity`; the rest belongs to the node's thread."""

    def __init__(self, interval: float, silence: float) -> None:
        self._interval = interval
        self._idle_interval = max(interval, min(_IDLE_FACTOR * interval, _MAX_IDLE_SHARE * silence))
        self._last_activity = self._last_sent = _LONG_AGO

    def note_activity(self, now: float) -> bool:
        """Record activity; return whether the node was idle, so that the next heartbeat is now due earlier."""
        was_idle = now - self._last_activity > IDLE_AFTER
        self._last_activity = now
        return was_idle

    def sent(self, now: float) -> None:
        """Record that heartbeats were sent."""
        self._last_sent = now

    @property
    def due(self) -> float:
        """Time at which the next heartbeat is due.

        Idle processes of one machine share its clock and send at the same moments, so they wake the machine once for
        all.
        """
        if self._last_sent - self._last_activity <= IDLE_AFTER or self._idle_interval == self._interval:
            return self._last_sent + self._interval
        periods = (self._last_sent + self._idle_interval / 8) // self._idle_interval
        return (periods + 1) * self._idle_interval
