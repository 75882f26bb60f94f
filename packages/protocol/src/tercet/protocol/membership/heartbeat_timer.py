"""How often a node says that it lives: several times a second while anything goes on, less often while nothing does.

Who is up must be heard well within everybody's patience at all times, so a part that hangs is found as soon in the one
case as in the other. What the quick beat adds is news: what a part holds, and how far it is.
A part can go on saying so and still be stuck in a step: that is judged here, too, for all who ask.
"""

from tercet.protocol.messages.messages import Heartbeat
from tercet.protocol.messages.values import Phase

RESTS_AFTER = 2.0
"""Seconds without anything going on."""
_REST = 3
"""Intervals between beats at rest."""
_SHARE = 0.375
"""The longest interval at rest, as a share of `silence`: two beats may get lost or come late."""

_STUCK_STEP = 30.0
"""Seconds without a sign of a step after which it may count as stuck."""
_STUCK_FACTOR = 20.0
"""It does once that is more than so many times the longest silence of any earlier step."""

_LONG_AGO = -1e9


def is_busy(heartbeat: Heartbeat) -> bool:
    """Whether whoever says this has work, or is about to."""
    load = heartbeat.load
    return heartbeat.phase is not Phase.IDLE or bool(load.running or load.queued or heartbeat.held.rids)


def is_stuck(heartbeat: Heartbeat) -> bool:
    """Whether whoever says this is in a step that has been silent for far longer than any before it, and will not end.

    Hung is not slow: a step that is known to take long tells of its pieces (`Heartbeat.step_age`).
    """
    in_step = heartbeat.phase in {Phase.STEP, Phase.DRAINING}
    return in_step and heartbeat.step_age > max(_STUCK_STEP, _STUCK_FACTOR * heartbeat.longest_step)


class HeartbeatTimer:
    """The time of the next beat. Any thread may `stir`, the others belong to the node's."""

    def __init__(self, interval: float, silence: float) -> None:
        self._interval = interval
        self._rest = max(interval, min(_REST * interval, _SHARE * silence))
        self._stirred = self._beaten = _LONG_AGO

    def stir(self, now: float) -> bool:
        """Note that something goes on. True if the node was at rest: the next beat is then due sooner."""
        rested = now - self._stirred > RESTS_AFTER
        self._stirred = now
        return rested

    def beaten(self, now: float) -> None:
        """A beat went out."""
        self._beaten = now

    @property
    def due(self) -> float:
        """When the next one should.

        The parts of one machine, which share its clock, beat together at rest: they wake it once for all.
        """
        if self._beaten - self._stirred <= RESTS_AFTER or self._rest == self._interval:
            return self._beaten + self._interval
        periods = (self._beaten + self._rest / 8) // self._rest
        return (periods + 1) * self._rest
