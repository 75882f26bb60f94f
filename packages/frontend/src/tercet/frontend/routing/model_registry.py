"""Registry of served models, built from schedulers' announcements and the tokenizer files they send."""

import asyncio
import hashlib
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from concurrent.futures import Executor
from typing import NamedTuple

from tercet.frontend.errors import ModelNotFoundError, UnavailableError
from tercet.frontend.model.served_model import ModelFiles, ServedModel
from tercet.frontend.model.tokenizer_pool import TokenizerPool
from tercet.frontend.routing.peers import SchedulerPeer, WeightLineage
from tercet.protocol.messages.messages import TokenizerFiles
from tercet.protocol.messages.values import ModelIdentity, ModelLimits

logger = logging.getLogger(__name__)


def _log_unreadable(peer: str, reason: str) -> None:  # noqa: ARG001
    logger.error("%s", reason)


class ModelRegistry:
    """Served models by name. A model stays known after its last scheduler is gone, which may return."""

    def __init__(
        self,
        pool: Executor,
        names: Sequence[str] = (),
        *,
        threads: int = 1,
        expected: int = 0,
        timeout: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
        on_unreadable: Callable[[str, str], None] = _log_unreadable,
        chat_template: str | None = None,
    ) -> None:
        """Expect `expected` schedulers to announce their models within `timeout` seconds.

        `on_unreadable` is called with a scheduler's id and the reason if its files cannot be read.
        `chat_template` is the source of a template in place of the models' own.
        """
        self._pool = pool
        self.tokenizer_pool = TokenizerPool(pool, threads=threads)
        """Shared by all models, with `threads` of the pool."""
        self._names = names
        self._expected = expected
        self._clock = clock
        self._on_unreadable = on_unreadable
        self._chat_template = chat_template
        self._deadline = clock() + timeout
        self._announced: set[str] = set()
        self._awaits_announcement = False
        """Some connected scheduler has not announced its model yet."""
        self._unreadable: set[str] = set()
        self._files: dict[str, ModelFiles] = {}
        self._loads: dict[frozenset[tuple[str, str]], asyncio.Task[ModelFiles]] = {}
        self._models: dict[str, ServedModel] = {}
        self._logged_conflicts: set[tuple[str, str, str]] = set()

    def __iter__(self) -> Iterator[ServedModel]:
        return iter(self._models.values())

    @property
    def peers(self) -> Set[str]:
        """Return the ids of the schedulers whose files have arrived."""
        return self._files.keys()

    def forget(self, peer: str) -> None:
        """Forget a scheduler that is gone: it may return with another model."""
        self._files.pop(peer, None)
        self._unreadable.discard(peer)
        self._logged_conflicts = {each for each in self._logged_conflicts if each[0] != peer}

    def get(self, name: str) -> ServedModel:
        """Return the model of a name. Raises ModelNotFoundError, or UnavailableError if it may still be announced."""
        if model := self._models.get(name):
            return model
        if not self._models or (not self._names and self._is_incomplete()):
            raise UnavailableError("The model is still loading.", retry_after=1)
        raise ModelNotFoundError(f"The model {name!r} does not exist: /v1/models lists the names.", param="model")

    def name_of(self, scheduler: SchedulerPeer) -> str:
        """Return the first served name of a scheduler's model, or of the one that it encodes for; empty if unknown."""
        if scheduler.encoder is not None:
            forms = ((each.name, each.limits.embeddings) for each in self)
            return next((name for name, form in forms if form and scheduler.encoder.encodes_for(form)), "")
        return "" if scheduler.limits is None else next(iter(self._names), scheduler.limits.model)

    def _is_incomplete(self) -> bool:
        """Return whether some scheduler has not announced its model yet."""
        return self._awaits_announcement or (len(self._announced) < self._expected and self._clock() < self._deadline)

    async def load(self, peer: str, message: TokenizerFiles, frames: Sequence[memoryview]) -> None:
        """Build tokenizer and template from a scheduler's files; identical files are read only once."""
        contents = [bytes(frame) for frame in frames]
        sums = [hashlib.sha256(content).hexdigest() for content in contents]
        if sums != message.sha256 or len(sums) != len(message.names):
            logger.error("%s: damaged tokenizer files, requesting them again", peer)
            return
        key = frozenset(zip(message.names, sums, strict=True))
        if key not in self._loads:
            self._loads[key] = asyncio.create_task(self._read(dict(zip(message.names, contents, strict=True))))
        try:
            self._files[peer] = await self._loads[key]
        except ValueError as error:
            if peer not in self._unreadable:
                self._unreadable.add(peer)
                self._on_unreadable(peer, f"the tokenizer files of {peer} are of no use: {error}")

    async def _read(self, contents: dict[str, bytes]) -> ModelFiles:
        return await asyncio.get_running_loop().run_in_executor(self._pool, ModelFiles, contents, self._chat_template)

    def update(self, schedulers: Iterable[SchedulerPeer], weight_lineage: WeightLineage) -> None:
        """Rebuild the models from all schedulers whose files and limits have arrived.

        If schedulers announce one name with different weights, the first weights keep the name as long as one of their
        schedulers is connected, unless `weight_lineage` says that the new weights replaced them. If schedulers of
        several software versions run equal weights, the `system_fingerprint` of one version is reported as long as a
        scheduler of that version is connected.
        """
        announcements: dict[str, list[_Announcement]] = {}
        self._awaits_announcement = False
        for scheduler in schedulers:
            if scheduler.encoder is not None:
                self._announced.add(scheduler.peer)
            if scheduler.outdated or scheduler.encoder is not None:
                continue
            files = self._files.get(scheduler.peer)
            if files is None or scheduler.limits is None or scheduler.identity is None:
                self._awaits_announcement |= scheduler.peer not in self._unreadable
                continue
            if len(self._announced) < self._expected:
                self._announced.add(scheduler.peer)
            for name in self._names or (scheduler.limits.model,):
                announcements.setdefault(name, []).append(
                    _Announcement(scheduler.peer, files, scheduler.limits, scheduler.identity, scheduler.software)
                )
        for name, candidates in announcements.items():
            known = self._models.get(name)
            if known is not None and (
                successors := [each for each in candidates if each.is_successor(known, weight_lineage)]
            ):
                candidates = successors
            if known is None or not any(announced.is_same_version(known) for announced in candidates):
                first = next(
                    (announced for announced in candidates if known is not None and announced.is_compatible(known)),
                    candidates[0],
                )
                known = self._models[name] = ServedModel(
                    name, first.files, first.limits, first.identity, self.tokenizer_pool, first.software
                )
            for announced in announcements[name]:
                if not weight_lineage.follows(known.identity.weights, announced.identity.weights):
                    self._log_conflict(name, known, announced)

    def _log_conflict(self, name: str, known: ServedModel, announced: "_Announcement") -> None:
        """Log once that a scheduler gets no requests for the name it announces."""
        conflict = (announced.peer, name, announced.identity.weights)
        if announced.identity.weights != known.identity.weights and conflict not in self._logged_conflicts:
            self._logged_conflicts.add(conflict)
            logger.error(
                "%s: other weights under the same name, routing no requests to it model=%s weights=%s",
                announced.peer,
                name,
                announced.identity.weights,
            )


class _Announcement(NamedTuple):
    """Model announced by one scheduler."""

    peer: str
    files: ModelFiles
    limits: ModelLimits
    identity: ModelIdentity
    software: str

    def is_same_version(self, model: ServedModel) -> bool:
        same_form = self.limits.embeddings == model.limits.embeddings
        return self.is_compatible(model) and self.software == model.software and same_form

    def is_successor(self, model: ServedModel, weight_lineage: WeightLineage) -> bool:
        """Return whether these weights replaced the model's."""
        return self.files is model.files and weight_lineage.follows(self.identity.weights, model.identity.weights)

    def is_compatible(self, model: ServedModel) -> bool:
        """Return whether requests for the model can run on this scheduler."""
        return self.identity.weights == model.identity.weights and self.files is model.files
