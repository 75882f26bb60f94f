"""What a heartbeat says: written by the loop between steps, read without waiting by the thread that sends it.

A step that is computed in many pieces says so after each (`advance`), from whichever thread computes it. What is told
of its age is how long there has been no sign of it, so that a step of minutes is not taken for one that hangs.
"""

from collections.abc import Callable

from tercet.protocol.messages.messages import Heartbeat
from tercet.protocol.messages.values import Held, Load, Phase


class StatusBoard:
    """The loop's last word about itself. Attributes are replaced whole, so another thread never reads half of one."""

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
        """Loading, compiling or idle."""
        self._phase = phase
        self._step_began = None

    def drain(self) -> bool:
        """Say draining from now on, whatever else happens. False if it was said already."""
        first, self._draining = not self._draining, True
        return first

    def begin_step(self) -> None:
        """A step was submitted. It is being computed once those before it are done."""
        self._phase = Phase.STEP
        if self._step_began is None:
            self._step_began = self._clock()

    def advance(self) -> None:
        """A piece of the step that is computed is done: its age begins anew. For one thread, the loop's or another."""
        now, began = self._clock(), self._step_began
        if began is not None:
            self._longest_piece = max(self._longest_piece, now - max(began, self._advanced))
        self._advanced = now

    def end_step(self, *, more: bool = False) -> None:
        """The oldest step is done; with `more` in flight the next is being computed from now on."""
        now = self._clock()
        if self._step_began is not None:
            self._longest = max(self._longest, now - max(self._step_began, self._advanced))
            self._step_seconds += now - self._step_began
        self._step_began = now if more else None
        self._steps += 1

    def publish(self, load: Load, held: dict[str, Held]) -> None:
        """How busy the core is, and what it holds for each frontend."""
        self._load, self._held = load, held

    def heartbeat(self, peer: str) -> Heartbeat:
        """The heartbeat for one peer; its `held` is empty unless it is a frontend with requests here."""
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
