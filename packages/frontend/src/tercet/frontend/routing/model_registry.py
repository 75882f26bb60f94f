"""The models this frontend can serve, made of what schedulers say and of the tokenizer files they send."""

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
    """Models by name. A model stays known when its schedulers are gone: they may come back."""

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
        """So many schedulers are `expected` to say what they serve, within `patience` seconds from now.

        `on_useless` is told which scheduler's files cannot be read, and why.
        """
        self._pool = pool
        self.text_work = TokenizerPool(pool, threads=threads)
        """Of all models: they share the `threads` of the pool."""
        self._names = names
        self._expected = expected
        self._clock = clock
        self._on_useless = on_useless
        self._patient_until = clock() + patience
        self._heard: set[str] = set()
        self._undecided = False
        """Whether some scheduler that is there has not said yet what it serves."""
        self._useless: set[str] = set()
        self._files: dict[str, ModelFiles] = {}
        self._loads: dict[frozenset[tuple[str, str]], asyncio.Task[ModelFiles]] = {}
        self._models: dict[str, ServedModel] = {}
        self._strangers: set[tuple[str, str, str]] = set()

    def __iter__(self) -> Iterator[ServedModel]:
        return iter(self._models.values())

    @property
    def peers(self) -> Set[str]:
        """The schedulers whose files are here."""
        return self._files.keys()

    def forget(self, peer: str) -> None:
        """A scheduler is gone, and may come back with another model."""
        self._files.pop(peer, None)
        self._useless.discard(peer)
        self._strangers = {each for each in self._strangers if each[0] != peer}

    def get(self, name: str) -> ServedModel:
        """The model a request names. Raises ModelNotFoundError, or UnavailableError while it may yet become known."""
        if model := self._models.get(name):
            return model
        if not self._models or (not self._names and self._may_learn_more()):
            raise UnavailableError("The model is still loading.", retry_after=1)
        raise ModelNotFoundError(f"The model {name!r} does not exist.", param="model")

    def name_of(self, scheduler: SchedulerPeer) -> str:
        """The first name that a scheduler's model has here; empty until it has said what it serves."""
        return "" if scheduler.limits is None else next(iter(self._names), scheduler.limits.model)

    def _may_learn_more(self) -> bool:
        """Whether not all schedulers have said what they serve."""
        return self._undecided or (len(self._heard) < self._expected and self._clock() < self._patient_until)

    async def load(self, peer: str, message: TokenizerFiles, frames: Sequence[memoryview]) -> None:
        """Make a tokenizer and a template of a scheduler's files; equal files are read once."""
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
        """Serve the models of all schedulers there are, once both the files and the limits of each are here.

        If schedulers give one name to different weights, those that came first keep it as long as one of them is there,
        unless the new weights replaced theirs (`successions`). If schedulers of several versions run equal weights, one
        version's `system_fingerprint` is told as long as a scheduler of it is there.
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
        """Say once of a scheduler that it is not used for the name it gives."""
        strange = (offer.peer, name, offer.identity.weights)
        if offer.identity.weights != known.identity.weights and strange not in self._strangers:
            self._strangers.add(strange)
            logger.error("%s gives the name %s to other weights: it gets no requests for it", offer.peer, name)


class _Offer(NamedTuple):
    """What a scheduler serves."""

    peer: str
    files: ModelFiles
    limits: ModelLimits
    identity: ModelIdentity
    software: str

    def is_of(self, model: ServedModel) -> bool:
        return self.could_be(model) and self.software == model.software

    def succeeds(self, model: ServedModel, successions: WeightLineage) -> bool:
        """Whether it has the weights that replaced the model's."""
        return self.files is model.files and successions.follows(self.identity.weights, model.identity.weights)

    def could_be(self, model: ServedModel) -> bool:
        """Whether requests for the model can run there."""
        return self.identity.weights == model.identity.weights and self.files is model.files
