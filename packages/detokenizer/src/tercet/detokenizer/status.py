"""What heartbeats say of this process. Written by the loop's thread, read by the node's."""

from collections.abc import Callable

from tercet.detokenizer.detokenizer_manager import DetokenizerManager
from tercet.protocol.messages.messages import Heartbeat
from tercet.protocol.messages.values import Load, Phase


class StatusBoard:
    """The phase, and how long the loop has been at the messages it took: a supervisor can tell hung from busy."""

    def __init__(self, manager: DetokenizerManager, clock: Callable[[], float]) -> None:
        self._manager = manager
        self._clock = clock
        self._phase = Phase.LOADING
        self._began: float | None = None
        self._steps = 0
        self._longest = 0.0

    def loaded(self) -> None:
        """There is a tokenizer to work with."""
        if self._phase is Phase.LOADING:
            self._phase = Phase.IDLE

    def drain(self) -> None:
        """Say draining from now on, whatever else happens."""
        self._phase = Phase.DRAINING

    def begin(self) -> None:
        """The loop has taken messages."""
        self._began = self._clock()

    def end(self) -> None:
        """The loop is done with them."""
        if self._began is not None:
            self._longest = max(self._longest, self._clock() - self._began)
            self._steps += 1
        self._began = None

    def heartbeat(self, peer: str) -> Heartbeat:
        """The heartbeat for one peer: a frontend learns which of its choices are held here."""
        began = self._began
        return Heartbeat(
            phase=Phase.STEP if began is not None and self._phase is Phase.IDLE else self._phase,
            steps=self._steps,
            step_age=0.0 if began is None else self._clock() - began,
            longest_step=self._longest,
            load=Load(running=len(self._manager), output_tokens=self._manager.counters["tokens"]),
            held=self._manager.held(peer),
        )
