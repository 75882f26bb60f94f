"""Weight transfers: requests of frontends, run in a thread until an ordinary weight update can load the result."""

import logging
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Protocol, assert_never

from tercet.protocol.json_files import error_line
from tercet.protocol.messages.codec import Frame
from tercet.protocol.messages.messages import ControlReply, UpdateWeightsFromDiskReq
from tercet.protocol.messages.weight_transfers import (
    DestroyWeightsUpdateGroupReq,
    GetWeightsByNameReq,
    InitWeightsUpdateGroupReq,
    UpdateWeightsFromDistributedReq,
    UpdateWeightsFromTensorReq,
    WeightTransferReq,
)
from tercet.scheduler.async_loader import ReadingThreads
from tercet.scheduler.weight_transfer.staged_weights import StagedWeights, rows_of

logger = logging.getLogger(__name__)

_TIMEOUT = 1800.0
"""Seconds after which a transfer is given up."""


class UpdateGroups(Protocol):
    """Process groups of torch.distributed in which a trainer broadcasts weights. All methods raise ValueError."""

    def join(self, request: InitWeightsUpdateGroupReq) -> None: ...
    def leave(self, group: str) -> None: ...
    def receive(self, request: UpdateWeightsFromDistributedReq) -> bytes:
        """Return the broadcast tensors as a safetensors file."""
        ...


class NoUpdateGroups:
    """Refusal of all groups, for a reason."""

    def __init__(self, reason: str) -> None:
        self._reason = reason

    def join(self, request: InitWeightsUpdateGroupReq) -> None:  # noqa: ARG002
        """Raise ValueError."""
        raise ValueError(self._reason)

    def leave(self, group: str) -> None:  # noqa: ARG002
        """Raise ValueError."""
        raise ValueError(self._reason)

    def receive(self, request: UpdateWeightsFromDistributedReq) -> bytes:  # noqa: ARG002
        """Raise ValueError."""
        raise ValueError(self._reason)


Outcome = ControlReply | UpdateWeightsFromDiskReq
"""End of a transfer: the reply to the frontend, or an update that loads the weights."""


class WeightTransfers:
    """Transfers in progress, one at a time in order. All methods are called by the loop's thread."""

    def __init__(self, stage: StagedWeights, base: Path, groups: UpdateGroups) -> None:
        """Create it. `base` is the directory of the served weights."""
        self._stage = stage
        self._base = base
        self._groups = groups
        self._threads = ReadingThreads(1, "receive weights", _TIMEOUT)
        self._pending: deque[tuple[str, str, Future[Outcome]]] = deque()
        """(frontend, request id, outcome)."""

    @property
    def busy(self) -> bool:
        """Return whether `pop_finished` will return transfers, now or later."""
        return bool(self._pending)

    def request(self, source: str, request: WeightTransferReq, frames: Sequence[Frame]) -> None:
        """Start a transfer once those before it have ended."""
        self._pending.append((source, request.id, self._threads.submit(self._run, request, frames)))

    def pop_finished(self) -> list[tuple[str, Outcome]]:
        """Return the frontend and the outcome of transfers that have ended, in order; each is returned once."""
        finished = []
        while self._pending and self._pending[0][2].done():
            source, number, future = self._pending.popleft()
            finished.append((source, _outcome(number, future)))
        return finished

    def on_loaded(self, path: Path) -> None:
        """Make these weights the base of the next update. Remove all staged checkpoints but them and the old base."""
        self._stage.remove_others(path, self._base)
        self._base = path

    def on_refused(self, path: Path) -> None:
        """Remove these weights, which cannot be loaded, if they arrived in messages."""
        if path != self._base:
            self._stage.remove_checkpoint(path)

    def close(self) -> None:
        """Start no more transfers."""
        self._threads.shutdown(cancel_futures=True)

    def _run(self, request: WeightTransferReq, frames: Sequence[Frame]) -> Outcome:
        complete = False
        match request:
            case InitWeightsUpdateGroupReq():
                self._groups.join(request)
            case DestroyWeightsUpdateGroupReq(group=group):
                self._groups.leave(group)
            case GetWeightsByNameReq(name=name, rows=rows):
                return ControlReply(id=request.id, ok=True, message=rows_of(self._base, name, rows))
            case UpdateWeightsFromTensorReq(part=part, last=complete):
                self._stage.add(part, frames)
            case UpdateWeightsFromDistributedReq(part=part, last=complete):
                self._stage.add(part, [self._groups.receive(request)])
            case _:
                assert_never(request)
        if complete:
            return UpdateWeightsFromDiskReq(id=request.id, path=str(self._stage.complete(self._base)))
        return ControlReply(id=request.id, ok=True)


def _outcome(number: str, future: Future[Outcome]) -> Outcome:
    error = future.exception()
    if error is None:
        return future.result()
    if not isinstance(error, ValueError | OSError):
        logger.error("weights: transfer failed", exc_info=error)
    return ControlReply(id=number, ok=False, message=error_line(error))
