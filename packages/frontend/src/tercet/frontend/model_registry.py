"""The models this frontend can serve, made of what schedulers say and of the tokenizer files they send."""

import asyncio
import hashlib
import logging
from collections.abc import Iterator, Sequence, Set
from concurrent.futures import Executor

from tercet.frontend.errors import ModelNotFoundError, UnavailableError
from tercet.frontend.fleet import SchedulerPeer
from tercet.frontend.served_model import ModelFiles, ServedModel
from tercet.protocol.messages import TokenizerFiles

logger = logging.getLogger(__name__)


class ModelRegistry:
    """Models by name. A model stays known when its schedulers are gone: they may come back."""

    def __init__(self, pool: Executor, names: Sequence[str] = ()) -> None:
        self._pool = pool
        self._names = names
        self._files: dict[str, ModelFiles] = {}
        self._loads: dict[frozenset[tuple[str, str]], asyncio.Task[ModelFiles | None]] = {}
        self._models: dict[str, ServedModel] = {}

    def __iter__(self) -> Iterator[ServedModel]:
        return iter(self._models.values())

    @property
    def peers(self) -> Set[str]:
        """The schedulers whose files are here."""
        return self._files.keys()

    def forget(self, peer: str) -> None:
        """A scheduler is gone, and may come back with another model."""
        self._files.pop(peer, None)

    def get(self, name: str) -> ServedModel:
        """The model a request names. Raises ModelNotFoundError, or UnavailableError while no model is known at all."""
        if model := self._models.get(name):
            return model
        if not self._models:
            raise UnavailableError("The model is still loading.", retry_after=1)
        raise ModelNotFoundError(f"The model {name!r} does not exist.", param="model")

    async def load(self, peer: str, message: TokenizerFiles, frames: Sequence[memoryview]) -> None:
        """Make a tokenizer and a template of a scheduler's files; equal files are read once."""
        contents = [bytes(frame) for frame in frames]
        sums = [hashlib.sha256(content).hexdigest() for content in contents]
        if sums != message.sha256 or len(sums) != len(message.names):
            logger.error("the tokenizer files of %s arrived damaged", peer)
            return
        key = frozenset(zip(message.names, sums, strict=True))
        if key not in self._loads:
            self._loads[key] = asyncio.create_task(self._read(peer, dict(zip(message.names, contents, strict=True))))
        if files := await self._loads[key]:
            self._files[peer] = files

    async def _read(self, peer: str, contents: dict[str, bytes]) -> ModelFiles | None:
        try:
            return await asyncio.get_running_loop().run_in_executor(self._pool, ModelFiles, contents)
        except ValueError as error:
            logger.error("the tokenizer files of %s are of no use: %s", peer, error)
            return None

    def register(self, scheduler: SchedulerPeer) -> bool:
        """Serve a scheduler's model once both its files and its limits are here. True when it is served."""
        files = self._files.get(scheduler.peer)
        if files is None or scheduler.limits is None or scheduler.identity is None:
            return False
        for name in self._names or (scheduler.limits.model,):
            known = self._models.get(name)
            if known is None or known.identity.weights != scheduler.identity.weights or known.files is not files:
                self._models[name] = ServedModel(name, files, scheduler.limits, scheduler.identity)
        return True
