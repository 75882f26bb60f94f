"""Decisions that ranks must make together, because they must issue the same collectives in the same order, and pass on
the same hidden states.

If one rank differs, the others block in a collective. Therefore no rank may retry, split a step by its duration, or
skip work for lack of memory, unless all do; and rank 0's sampled tokens are broadcast.
"""

from collections.abc import Callable
from typing import Protocol

import torch

from tercet.scheduler.device.oom import NoSplit, OomPolicy, SplitOnOom, lacks_memory
from tercet.scheduler.executor.chunked_model import OomChunkedModel, report_progress
from tercet.scheduler.executor.forward_batch import ForwardBatch
from tercet.scheduler.executor.graphs.cuda_graphs import Recorder
from tercet.scheduler.executor.model_runner import Model
from tercet.scheduler.models.layers.shard import AttentionRanks, Collectives, Shard
from tercet.scheduler.ports import Advance

_CANNOT, _LACKS_MEMORY, _RECORDED = range(3)
"""Outcomes of a recording, the worst first: if ranks differ, all take the worst."""


class RankError(Exception):
    """The ranks of a model cannot continue together. The process that raises it ends, and so do the others."""


class RankStrategy(Protocol):
    """The interface for decisions that a rank of several cannot make alone."""

    def agree(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the sampled tokens of all rows, the same in every rank."""
        ...

    def oom_policy(self, unit: str, release: Callable[[], None]) -> OomPolicy:
        """Return the policy for rows that may not fit in memory: `SplitOnOom` or `NoSplit`."""
        ...

    def wrap_model(self, model: Model, device: torch.device, advance: Advance) -> Model:
        """Return a model that handles lack of memory or long steps."""
        ...

    def wrap_recorder(self, recorder: Recorder) -> Recorder:
        """Return a recorder of graphs."""
        ...


class SingleRank:
    """The `RankStrategy` of a model with one process."""

    def agree(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the tokens."""
        return tokens

    def oom_policy(self, unit: str, release: Callable[[], None]) -> OomPolicy:
        """Return `SplitOnOom`."""
        return SplitOnOom(unit, release)

    def wrap_model(self, model: Model, device: torch.device, advance: Advance) -> Model:
        """Return a model that splits steps: on lack of memory on a GPU, by their duration on a CPU."""
        return OomChunkedModel(model) if device.type == "cuda" else report_progress(model, advance)

    def wrap_recorder(self, recorder: Recorder) -> Recorder:
        """Return the recorder."""
        return recorder


class MultiRank:
    """The `RankStrategy` of one rank of several: it raises, and the process dies, if it cannot do what all do."""

    def __init__(self, collectives: Collectives, wrap: Callable[[Model], Model] = lambda model: model) -> None:
        """Create the strategy. `wrap` is applied to the model."""
        self._collectives = collectives
        self._wrap = wrap
        self.agree = collectives.broadcast

    def oom_policy(self, unit: str, release: Callable[[], None]) -> OomPolicy:  # noqa: ARG002
        """Return `NoSplit`."""
        return NoSplit()

    def wrap_model(self, model: Model, device: torch.device, advance: Advance) -> Model:  # noqa: ARG002
        """Return the wrapped model. Its collectives report progress."""
        return self._wrap(model)

    def wrap_recorder(self, recorder: Recorder) -> Recorder:
        """Return a recorder that succeeds in all ranks or in none."""
        return JointRecorder(recorder, self._collectives)


class JointRecorder:
    """A `Recorder` that agrees with other ranks on the outcome of each recording."""

    def __init__(self, recorder: Recorder, collectives: Collectives) -> None:
        self._recorder = recorder
        self._collectives = collectives

    def record(self, run: Callable[[], torch.Tensor]) -> tuple[Callable[[], None], torch.Tensor]:
        """See `Recorder`. If one rank fails, all raise: MemoryError if it lacked memory, else RuntimeError.

        Raise RankError if the first call of `run` failed, because others may wait in its collectives. The capture after
        that call executes none. A failed launch is a RankError, too.
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
        worst = self._collectives.all_reduce_min(outcome)
        if worst < outcome:
            raise _ELSEWHERE[worst]("another process of this model could not record it") from error


class DividedHead:
    """A model each of whose attention ranks computes the logits of an equal run of rows."""

    def __init__(self, model: Model, ranks: AttentionRanks) -> None:
        self._model = model
        self._ranks = ranks

    def __call__(self, input_ids: torch.Tensor, positions: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        """See `Model`."""
        return self._model(input_ids, positions, batch)

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """See `Model`. All ranks have the same hidden states, and get the same logits."""
        share = -(-len(hidden) // self._ranks.size)
        rows = torch.arange(self._ranks.rank * share, (self._ranks.rank + 1) * share).clamp(max=len(hidden) - 1)
        own = self._model.compute_logits(hidden[rows.to(hidden.device)])
        whole = self._ranks.collectives.all_gather(own.reshape(1, -1)).view(-1, own.shape[1])
        return whole[: len(hidden)]


_ELSEWHERE: dict[int, type[Exception]] = {_CANNOT: RuntimeError, _LACKS_MEMORY: MemoryError}

SOLO = SingleRank()


def rank_strategy_of(shard: Shard) -> RankStrategy:
    """Return the strategy of a worker that holds a shard."""
    if shard.attention.size > 1:
        return MultiRank(shard.attention.collectives, lambda model: DividedHead(model, shard.attention))
    return SOLO if shard.is_whole else MultiRank(shard.collectives)
