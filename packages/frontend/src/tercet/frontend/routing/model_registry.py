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
from tercet.frontend.routing.peers import SchedulerPeer
from tercet.frontend.routing.weight_versions import WeightLineage
from tercet.protocol.messages.messages import TokenizerFiles
from tercet.protocol.messages.values import ModelIdentity, ModelLimits

logger = logging.getLogger(__name__)


def _log_useless(peer: str, reason: str) -> None:  # noqa: ARG001
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
        patience: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
        on_useless: Callable[[str, str], None] = _log_useless,
    ) -> None:
        """Expect `expected` schedulers to announce their models within `patience` seconds.

        `on_useless` is called with a scheduler's id and the reason if its files cannot be read.
        """
        self._pool = pool
        self.text_work = TokenizerPool(pool, threads=threads)
        """Shared by all models, with `threads` of the pool."""
        self._names = names
        self._expected = expected
        self._clock = clock
        self._on_useless = on_useless
        self._patient_until = clock() + patience
        self._heard: set[str] = set()
        self._undecided = False
        """Some connected scheduler has not announced its model yet."""
        self._useless: set[str] = set()
        self._files: dict[str, ModelFiles] = {}
        self._loads: dict[frozenset[tuple[str, str]], asyncio.Task[ModelFiles]] = {}
        self._models: dict[str, ServedModel] = {}
        self._strangers: set[tuple[str, str, str]] = set()

    def __iter__(self) -> Iterator[ServedModel]:
        return iter(self._models.values())

    @property
    def peers(self) -> Set[str]:
        """Return the ids of the schedulers whose files have arrived."""
        return self._files.keys()

    def forget(self, peer: str) -> None:
        """Forget a scheduler that is gone: it may return with another model."""
        self._files.pop(peer, None)
        self._useless.discard(peer)
        self._strangers = {each for each in self._strangers if each[0] != peer}

    def get(self, name: str) -> ServedModel:
        """Return the model of a name. Raises ModelNotFoundError, or UnavailableError if it may still be announced."""
        if model := self._models.get(name):
            return model
        if not self._models or (not self._names and self._may_learn_more()):
            raise UnavailableError("The model is still loading.", retry_after=1)
        raise ModelNotFoundError(f"The model {name!r} does not exist.", param="model")

    def name_of(self, scheduler: SchedulerPeer) -> str:
        """Return the first served name of a scheduler's model; empty until the scheduler has announced it."""
        return "" if scheduler.limits is None else next(iter(self._names), scheduler.limits.model)

    def _may_learn_more(self) -> bool:
        """Return whether some scheduler has not announced its model yet."""
        return self._undecided or (len(self._heard) < self._expected and self._clock() < self._patient_until)

    async def load(self, peer: str, message: TokenizerFiles, frames: Sequence[memoryview]) -> None:
        """Build tokenizer and template from a scheduler's files; identical files are read only once."""
        contents = [bytes(frame) for frame in frames]
        sums = [hashlib.sha256(content).hexdigest() for content in contents]
        if sums != message.sha256 or len(sums) != len(message.names):
            logger.error("the tokenizer files of %s arrived damaged", peer)
            return
        key = frozenset(zip(message.names, sums, strict=True))
        if key not in self._loads:
            self._loads[key] = asyncio.create_task(self._read(dict(zip(message.names, contents, strict=True))))
        try:
            self._files[peer] = await self._loads[key]
        except ValueError as error:
            if peer not in self._useless:
                self._useless.add(peer)
                self._on_useless(peer, f"the tokenizer files of {peer} are of no use: {error}")

    async def _read(self, contents: dict[str, bytes]) -> ModelFiles:
        return await asyncio.get_running_loop().run_in_executor(self._pool, ModelFiles, contents)

    def update(self, schedulers: Iterable[SchedulerPeer], successions: WeightLineage) -> None:
        """Rebuild the models from all schedulers whose files and limits have arrived.

        If schedulers announce one name with different weights, the first weights keep the name as long as one of their
        schedulers is connected, unless `successions` says that the new weights replaced them. If schedulers of several
        software versions run equal weights, the `system_fingerprint` of one version is reported as long as a scheduler
        of that version is connected.
        """
        offers: dict[str, list[_Offer]] = {}
        self._undecided = False
        for scheduler in schedulers:
            if scheduler.outdated:
                continue
            files = self._files.get(scheduler.peer)
            if files is None or scheduler.limits is None or scheduler.identity is None:
                self._undecided |= scheduler.peer not in self._useless
                continue
            if len(self._heard) < self._expected:
                self._heard.add(scheduler.peer)
            for name in self._names or (scheduler.limits.model,):
                offers.setdefault(name, []).append(
                    _Offer(scheduler.peer, files, scheduler.limits, scheduler.identity, scheduler.software)
                )
        for name, offered in offers.items():
            known = self._models.get(name)
            if known is not None and (heirs := [each for each in offered if each.succeeds(known, successions)]):
                offered = heirs
            if known is None or not any(offer.is_of(known) for offer in offered):
                first = next((offer for offer in offered if known is not None and offer.could_be(known)), offered[0])
                known = self._models[name] = ServedModel(
                    name, first.files, first.limits, first.identity, self.text_work, first.software
                )
            for offer in offers[name]:
                if not successions.follows(known.identity.weights, offer.identity.weights):
                    self._note(name, known, offer)

    def _note(self, name: str, known: ServedModel, offer: "_Offer") -> None:
        """Log once that a scheduler gets no requests for the name it announces."""
        strange = (offer.peer, name, offer.identity.weights)
        if offer.identity.weights != known.identity.weights and strange not in self._strangers:
            self._strangers.add(strange)
            logger.error("%s gives the name %s to other weights: it gets no requests for it", offer.peer, name)


class _Offer(NamedTuple):
    """Model announced by one scheduler."""

    peer: str
    files: ModelFiles
    limits: ModelLimits
    identity: ModelIdentity
    software: str

    def is_of(self, model: ServedModel) -> bool:
        return self.could_be(model) and self.software == model.software

    def succeeds(self, model: ServedModel, successions: WeightLineage) -> bool:
        """Return whether these weights replaced the model's."""
        return self.files is model.files and successions.follows(self.identity.weights, model.identity.weights)

    def could_be(self, model: ServedModel) -> bool:
        """Return whether requests for the model can run on this scheduler."""
        return self.identity.weights == model.identity.weights and self.files is model.files
