"""Status that heartbeats report. The loop writes it between steps; the node's thread reads it without waiting.

A step that is computed in several pieces calls `advance` after each, from the thread that computes it. The reported age
of a step is the time since the last such call, so that a step of minutes is not mistaken for one that hangs.
"""

from collections.abc import Callable

from tercet.protocol.messages.messages import Heartbeat
from tercet.protocol.messages.values import Held, Load, Phase


class StatusBoard:
    """The loop's current status. Attributes are replaced as a whole, so another thread never reads a partial value."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._phase = Phase.LOADING
        self._draining = False
        self._steps = 0
        self._step_began: float | None = None
        self._longest = 0.0
        self._step_seconds = 0.0
        self._advanced = float("-inf")  # these two belong to the thread that computes
        self._longest_piece = 0.0
        self._load = Load()
        self._held: dict[str, Held] = {}

    def enter(self, phase: Phase) -> None:
        """Enter a phase other than a step: loading, compiling or idle."""
        self._phase = phase
        self._step_began = None

    def drain(self) -> bool:
        """Report the phase as draining from now on. Return False if it was reported before."""
        first, self._draining = not self._draining, True
        return first

    def begin_step(self) -> None:
        """Note that a step was submitted. Its computation begins when the steps before it are done."""
        self._phase = Phase.STEP
        if self._step_began is None:
            self._step_began = self._clock()

    def advance(self) -> None:
        """Note that a piece of the current step is done, which resets its age. Only one thread may call this."""
        now, began = self._clock(), self._step_began
        if began is not None:
            self._longest_piece = max(self._longest_piece, now - max(began, self._advanced))
        self._advanced = now

    def end_step(self, *, more: bool = False) -> None:
        """Note that the oldest step is done.

        With `more` steps in flight, the next one is being computed from now on.
        """
        now = self._clock()
        if self._step_began is not None:
            self._longest = max(self._longest, now - max(self._step_began, self._advanced))
            self._step_seconds += now - self._step_began
        self._step_began = now if more else None
        self._steps += 1

    def publish(self, load: Load, held: dict[str, Held]) -> None:
        """Set the load of the core and the requests it holds for each frontend."""
        self._load, self._held = load, held

    def heartbeat(self, peer: str) -> Heartbeat:
        """Return the heartbeat for one peer. Its `held` is empty unless the peer is a frontend with requests here."""
        began, advanced = self._step_began, self._advanced
        return Heartbeat(
            phase=Phase.DRAINING if self._draining else self._phase,
            steps=self._steps,
            step_age=0.0 if began is None else self._clock() - max(began, advanced),
            longest_step=max(self._longest, self._longest_piece),
            step_seconds=self._step_seconds,
            load=self._load,
            held=self._held.get(peer, Held()),
        )
