"""Heartbeats of the detokenizer. Written by the loop's thread, read by the node's."""

from collections.abc import Callable

from tercet.detokenizer.detokenizer_manager import DetokenizerManager
from tercet.protocol.messages.messages import Heartbeat
from tercet.protocol.messages.values import Load, Phase


class StatusBoard:
    """Phase of the process and duration of the loop's current round, by which a supervisor tells hung from busy."""

    def __init__(self, manager: DetokenizerManager, clock: Callable[[], float]) -> None:
        self._manager = manager
        self._clock = clock
        self._phase = Phase.LOADING
        self._began: float | None = None
        self._steps = 0
        self._longest = 0.0

    def loaded(self) -> None:
        """Leave the loading phase: a tokenizer is available."""
        if self._phase is Phase.LOADING:
            self._phase = Phase.IDLE

    def drain(self) -> None:
        """Report the draining phase from now on."""
        self._phase = Phase.DRAINING

    def begin(self) -> None:
        """Mark the begin of a round of messages."""
        self._began = self._clock()

    def end(self) -> None:
        """Mark the end of the round."""
        if self._began is not None:
            self._longest = max(self._longest, self._clock() - self._began)
            self._steps += 1
        self._began = None

    def heartbeat(self, peer: str) -> Heartbeat:
        """Return the heartbeat for one peer; a frontend sees which of its choices are held here."""
        began = self._began
        return Heartbeat(
            phase=Phase.STEP if began is not None and self._phase is Phase.IDLE else self._phase,
            steps=self._steps,
            step_age=0.0 if began is None else self._clock() - began,
            longest_step=self._longest,
            load=Load(running=len(self._manager), output_tokens=self._manager.counters["tokens"]),
            held=self._manager.held(peer),
        )
