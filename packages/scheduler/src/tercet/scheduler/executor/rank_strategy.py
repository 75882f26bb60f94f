"""What a process that shares its model may not decide by itself: whatever changes which collectives come next.

The others would wait in theirs for ever. So nothing is tried again, cut into parts by how long it took, or left out
for want of memory, unless all do it; and what is drawn is drawn by one of them.
"""

from collections.abc import Callable
from typing import Protocol

import torch

from tercet.scheduler.device.oom import NoSplit, OomPolicy, SplitOnOom, lacks_memory
from tercet.scheduler.executor.cuda_graphs import Recorder
from tercet.scheduler.executor.model_runner import Model
from tercet.scheduler.executor.pacing import telling
from tercet.scheduler.executor.shrinking import OomChunkedModel
from tercet.scheduler.models.layers.shard import Collectives, Shard
from tercet.scheduler.ports import Advance

_CANNOT, _LACKS_MEMORY, _RECORDED = range(3)
"""Outcomes of a recording, the worst first: if processes differ, all take the worst."""


class RankError(Exception):
    """The processes of a model cannot go on together. Whoever raises it ends, and so do the others."""


class RankStrategy(Protocol):
    """How a worker does what it cannot decide alone where other processes share its model."""

    def agree(self, tokens: torch.Tensor) -> torch.Tensor:
        """The sampled tokens of all rows: the same in every process."""
        ...

    def divided(self, unit: str, release: Callable[[], None]) -> OomPolicy:
        """How rows are computed when memory may be short: `SplitOnOom`, or not in parts at all."""
        ...

    def wrapped(self, model: Model, device: torch.device, advance: Advance) -> Model:
        """A model that deals with a want of memory, or with steps that take long."""
        ...

    def recording(self, recorder: Recorder) -> Recorder:
        """What records graphs."""
        ...


class SingleRank:
    """The `RankStrategy` of a process that has its model to itself."""

    def agree(self, tokens: torch.Tensor) -> torch.Tensor:
        """With itself."""
        return tokens

    def divided(self, unit: str, release: Callable[[], None]) -> OomPolicy:
        """In halves."""
        return SplitOnOom(unit, release)

    def wrapped(self, model: Model, device: torch.device, advance: Advance) -> Model:
        """One that is computed in parts where that helps."""
        return OomChunkedModel(model) if device.type == "cuda" else telling(model, advance)

    def recording(self, recorder: Recorder) -> Recorder:
        """The same."""
        return recorder


class MultiRank:
    """The `RankStrategy` of a process among several: where it cannot do what all do, it raises and dies."""

    def __init__(self, collectives: Collectives) -> None:
        self._collectives = collectives
        self.agree = collectives.broadcast

    def divided(self, unit: str, release: Callable[[], None]) -> OomPolicy:  # noqa: ARG002
        """Not at all."""
        return NoSplit()

    def wrapped(self, model: Model, device: torch.device, advance: Advance) -> Model:  # noqa: ARG002
        """The same. Its collectives give signs of life."""
        return model

    def recording(self, recorder: Recorder) -> Recorder:
        """What all have recorded, or none."""
        return JointRecorder(recorder, self._collectives)


class JointRecorder:
    """A `Recorder` beside those of other processes, with whom it agrees on how a recording went."""

    def __init__(self, recorder: Recorder, collectives: Collectives) -> None:
        self._recorder = recorder
        self._collectives = collectives

    def record(self, run: Callable[[], torch.Tensor]) -> tuple[Callable[[], None], torch.Tensor]:
        """See `Recorder`. If one process fails all raise: others MemoryError where it lacked memory, else RuntimeError.

        RankError where the first call of `run` failed: others may then wait in its collectives. Recording, which comes
        after that call, runs none. A launch that fails is a RankError likewise.
        """
        ran = False

        def first() -> torch.Tensor:
            nonlocal ran
            output = run()
            ran = True
            return output

        try:
            replay, output = self._recorder.record(first)
        except (MemoryError, RuntimeError) as error:
            if not ran:
                raise RankError(f"a step cannot be computed to be recorded: {error}") from error
            self._agree(_LACKS_MEMORY if lacks_memory(error) else _CANNOT, error)
            raise
        self._agree(_RECORDED)

        def launch() -> None:
            try:
                replay()
            except RuntimeError as error:
                raise RankError(f"what was recorded cannot be launched: {error}") from error

        return launch, output

    def _agree(self, outcome: int, error: Exception | None = None) -> None:
        worst = self._collectives.smallest(outcome)
        if worst < outcome:
            raise _ELSEWHERE[worst]("another process of this model could not record it") from error


_ELSEWHERE: dict[int, type[Exception]] = {_CANNOT: RuntimeError, _LACKS_MEMORY: MemoryError}

SOLO = SingleRank()


def rank_strategy_of(shard: Shard) -> RankStrategy:
    """That of a worker that holds a shard."""
    return SOLO if shard.size == 1 else MultiRank(shard.collectives)
