"""Weight updates of running schedulers, and of schedulers that start with replaced weights."""

import asyncio
import logging
from collections.abc import Callable, Sequence

from tercet.frontend.errors import BadRequestError, UnavailableError
from tercet.frontend.routing.control import Answer, Control
from tercet.frontend.routing.model_registry import ModelRegistry
from tercet.frontend.routing.peers import PeerRegistry
from tercet.protocol.messages.codec import Frame
from tercet.protocol.messages.messages import UpdateWeightsFromDiskReq
from tercet.protocol.messages.weight_transfers import WeightTransferReq

logger = logging.getLogger(__name__)

PartOrder = Callable[[str, int, bool], WeightTransferReq]
"""Creates the message of a part from the request id, the number of parts before it, and whether it is the last."""
PeersOrder = Callable[[str, Sequence[str]], WeightTransferReq]
"""Creates a message from the request id and the schedulers that get it."""

UPDATE_TIMEOUT = 3600.0
"""Seconds for running requests to finish with the old weights, and for the new ones to load."""
_READY_TIMEOUT = 1.0
"""Seconds to wait for a scheduler's `Ready` with the new fingerprint, which may follow its reply."""


class WeightUpdates:
    """Coordinator of weight updates. All methods run on the event loop's thread."""

    def __init__(self, models: ModelRegistry, fleet: PeerRegistry, control: Control) -> None:
        self._models = models
        self._fleet = fleet
        self._control = control
        self._updates: dict[str, asyncio.Task[None]] = {}
        self._versions: dict[str, str] = {}
        self._parts: dict[str, int] = {}
        """Parts that were sent of an unfinished update, by model."""

    async def close(self) -> None:
        """Cancel updates of outdated schedulers."""
        updates = list(self._updates.values())
        for each in updates:
            each.cancel()
        await asyncio.gather(*updates, return_exceptions=True)

    async def update(
        self, path: str, model: str | None = None, *, rolling: bool = False, version: str = ""
    ) -> dict[str, str]:
        """Load the weights of a directory on all schedulers of a model, one by one if `rolling`.

        `version` is the client's name for the new weights.

        Returns the new fingerprint of each scheduler by its id. Raises ModelNotFoundError, BadRequestError if a
        scheduler refuses the weights, and UnavailableError if one does not reply; others may have loaded them then.
        """
        peers = self._schedulers(model)
        for group in [[peer] for peer in peers] if rolling else [peers]:
            before = self._identities(group)
            _check(await self._broadcast(path, group))
            await self._wait_for_identities(group, before)
        return self._loaded(peers, version)

    async def transfer(
        self,
        order: PartOrder,
        model: str | None = None,
        *,
        frames: Sequence[Frame] = (),
        last: bool = True,
        version: str = "",
    ) -> dict[str, str]:
        """Send all schedulers of a model a part of new weights, which they load with the last part.

        Returns the fingerprints and raises as `update` does. After an error, the next part is the first of an update.
        """
        peers = self._schedulers(model)
        before, key = self._identities(peers), model or ""
        part = self._parts.pop(key, 0)
        _check(
            await self._control.broadcast(lambda number: order(number, part, last), peers, UPDATE_TIMEOUT, frames),
            param=None,
        )
        if not last:
            self._parts[key] = part + 1
            return before
        await self._wait_for_identities(peers, before)
        return self._loaded(peers, version)

    async def ask(self, order: PeersOrder, model: str | None = None) -> dict[str, str]:
        """Send the schedulers of a model a request about transfers. Return their messages; raise as `update` does."""
        peers = self._schedulers(model)
        answers = await self._control.broadcast(lambda number: order(number, peers), peers, UPDATE_TIMEOUT)
        _check(answers, param=None, summary="A scheduler refuses")
        return {peer: answer.message for peer, answer in answers.items()}

    def _loaded(self, peers: Sequence[str], version: str) -> dict[str, str]:
        """Return the fingerprints of loaded weights, and give these weights the client's name for them."""
        loaded = self._identities(peers)
        if version:
            self._versions |= dict.fromkeys(loaded.values(), version)
        return loaded

    def version(self, weights: str) -> str:
        """Return the client's name for weights with this fingerprint; without one, the fingerprint."""
        return self._versions.get(weights, weights)

    def name_versions(self, version: str) -> None:
        """Give all weights that schedulers serve a name."""
        self._versions |= dict.fromkeys(self.fingerprints().values(), version)

    def fingerprints(self) -> dict[str, str]:
        """Return the fingerprint of each scheduler's weights by its id."""
        return self._identities(list(self._fleet.schedulers))

    def tick(self) -> None:
        """Update schedulers that started with replaced weights. Called periodically."""
        for each in self._fleet.schedulers.values():
            if each.outdated and each.ready and each.identity and each.peer not in self._updates:
                self._updates[each.peer] = asyncio.create_task(self._update_outdated(each.peer, each.identity.weights))

    async def _update_outdated(self, peer: str, old: str) -> None:
        try:
            await self._load_latest(peer, old)
        finally:
            del self._updates[peer]

    async def _load_latest(self, peer: str, old: str) -> None:
        weight_lineage = self._fleet.weight_lineage
        path = weight_lineage.path(weight_lineage.latest(old))
        logger.info("%s: weights are outdated, loading the latest path=%s", peer, path)
        answer = (await self._broadcast(path, [peer]))[peer]
        scheduler = self._fleet.schedulers.get(peer)
        if scheduler is None or answer.ok or not answer.answered:
            return
        logger.error("%s: loading the latest weights failed, keeping the outdated ones: %s", peer, answer.message)
        weight_lineage.forget(old)
        scheduler.outdated = False
        self._models.update(self._fleet.schedulers.values(), weight_lineage)

    def _schedulers(self, model: str | None) -> list[str]:
        """Return the schedulers of the given model, by default of the only one. Raises ApiError."""
        name = model
        if name is None:
            served = {each.limits.model: each.name for each in self._models}
            if len(served) > 1:
                raise BadRequestError("Several models are served here: say which.", param="model")
            name = next(iter(served.values()), "")
        known = self._models.get(name).limits.model
        peers = [each.peer for each in self._fleet.schedulers.values() if each.limits and each.limits.model == known]
        if not peers:
            raise UnavailableError(f"No scheduler of {name!r} is there.", retry_after=1)
        return peers

    async def _broadcast(self, path: str, peers: Sequence[str]) -> dict[str, Answer]:
        return await self._control.broadcast(
            lambda number: UpdateWeightsFromDiskReq(id=number, path=path), peers, UPDATE_TIMEOUT
        )

    def _identities(self, peers: Sequence[str]) -> dict[str, str]:
        """Return the weight fingerprints of the connected schedulers among these, by id."""
        there = (self._fleet.schedulers.get(peer) for peer in peers)
        return {each.peer: each.identity.weights for each in there if each is not None and each.identity is not None}

    async def _wait_for_identities(self, peers: Sequence[str], before: dict[str, str]) -> None:
        """Wait briefly until every scheduler reports other weights; one that had them already reports nothing."""
        deadline = asyncio.get_running_loop().time() + _READY_TIMEOUT
        while asyncio.get_running_loop().time() < deadline:
            if all(weights != before.get(peer) for peer, weights in self._identities(peers).items()):
                return
            await asyncio.sleep(0.01)


def _check(
    answers: dict[str, Answer], param: str | None = "model_path", summary: str = "The weights cannot be loaded"
) -> None:
    """Raise BadRequestError if a scheduler refused, UnavailableError if one did not answer."""
    for refused in (True, False):
        failures = [
            f"{peer}: {each.message.rstrip('.')}"
            for peer, each in sorted(answers.items())
            if not each.ok and each.answered is refused
        ]
        if failures and refused:
            message = f"{summary}. {', '.join(failures)}."
            raise BadRequestError(message, param=param, code="invalid_weights")
        if failures:
            raise UnavailableError(f"Not every scheduler has answered. {', '.join(failures)}.", retry_after=1)
