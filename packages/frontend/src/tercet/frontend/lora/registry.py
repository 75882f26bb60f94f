"""Registry of LoRA adapters by name.

Schedulers do not know names. A request carries the path of its adapter and the SHA-256 of its files, and the scheduler
loads the adapter on first use, so a restarted scheduler needs no resynchronization.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from tercet.frontend.config.validation import check_name, check_path
from tercet.frontend.errors import BadRequestError, ModelNotFoundError, UnavailableError, UnsupportedParameterError
from tercet.frontend.lora.store import Adapter, AdapterNames, AdaptersInMemory
from tercet.frontend.model.served_model import ServedModel
from tercet.frontend.routing.control import Answer, Control
from tercet.frontend.routing.model_registry import ModelRegistry
from tercet.frontend.routing.peers import PeerRegistry
from tercet.protocol.messages.messages import LoadLoRAAdapterReq, UnloadLoRAAdapterReq
from tercet.protocol.messages.values import LoRAAdapter

logger = logging.getLogger(__name__)

LOAD_TIMEOUT = 60.0
"""Seconds for a scheduler to read or download an adapter's files."""
_POLL = 0.02
_NONE_RUN = "This server runs no adapters: its schedulers were started without --max-loras."


@dataclass
class _ConfiguredAdapter:
    """Adapter from the options."""

    path: str
    adapter: Adapter | None = None
    """Set once schedulers have read it."""
    refusal: str = ""
    refused_by: frozenset[tuple[str, str]] = frozenset()
    """Schedulers with adapter support at the time of the refusal, by id and incarnation."""


class AdapterRegistry:
    """Adapters from the options (`configured`: paths by name) and those loaded at run time.

    All methods run on the event loop's thread. `clock` returns seconds since 1970.
    """

    def __init__(
        self,
        models: ModelRegistry,
        fleet: PeerRegistry,
        control: Control,
        configured: Mapping[str, str],
        names: AdapterNames | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._models = models
        self._fleet = fleet
        self._control = control
        self._configured = {name: _ConfiguredAdapter(path) for name, path in configured.items()}
        self._names = names or AdaptersInMemory()
        self._clock = clock
        self._loading: asyncio.Task[None] | None = None

    async def close(self) -> None:
        """Cancel the loading of adapters."""
        if self._loading is not None:
            self._loading.cancel()
            await asyncio.gather(self._loading, return_exceptions=True)

    # Lookups by name.

    async def model(self, name: str) -> ServedModel:
        """Return the model or adapter of that name; adapters also match as BASE:ADAPTER.

        Raises ModelNotFoundError, UnavailableError while the name may still become known, and BadRequestError for an
        adapter that cannot run.
        """
        bases = self._bases
        if bases and name not in bases:
            candidates = [(name, bases)]
            candidates += [(name.removeprefix(f"{base}:"), [base]) for base in bases if name.startswith(f"{base}:")]
            for own, among in candidates:
                configured = self._configured.get(own)
                adapter = self._loaded(own, configured) if configured else await self._names.find(own, among)
                if adapter is not None and adapter.base in among:
                    return self._with_adapter(adapter)
        return self._models.get(name)

    async def model_or_first(self, name: str | None) -> ServedModel:
        """Return the named model or adapter, or the first model without a name. Raises ApiError."""
        if name is not None:
            return await self.model(name)
        return next(iter(self._models), None) or self._models.get("")

    async def all(self) -> list[Adapter]:
        """Return every adapter that can be requested now."""
        configured = [each.adapter for each in self._configured.values() if each.adapter is not None]
        loaded = [each for each in await self._names.all(self._bases) if each.name not in self._configured]
        able = {model.name for model in self._models if self._runs_adapters(model)}
        return [each for each in configured + loaded if each.base in able]

    async def served(self) -> list[ServedModel]:
        """Return every adapter as a model."""
        return [self._with_adapter(each) for each in await self.all()]

    async def names(self) -> list[str]:
        """Return every name of a model or adapter."""
        adapters = await self.all()
        return self._bases + [name for each in adapters for name in (each.name, f"{each.base}:{each.name}")]

    # Loading and unloading.

    async def load(self, name: str, path: str, base: str | None = None) -> None:
        """Load an adapter on every scheduler of its model and register or replace its name.

        Requests in flight keep the previous adapter. Raises BadRequestError for an adapter that a scheduler refuses,
        and UnavailableError if a scheduler does not reply.
        """
        _validate(check_name, name, "lora_name")
        _validate(check_path, path, "lora_path")
        self._check_free(name)
        model = self._base(base)
        adapter = Adapter(name, model.name, await self._read(model, path), int(self._clock()))
        configured = self._configured.get(name)
        if configured is None:
            await self._names.put(adapter, self._bases)
        elif configured.adapter is None and configured.path == path:
            configured.adapter = adapter
        elif configured.adapter is None or configured.adapter.lora.sha256 != adapter.lora.sha256:
            raise BadRequestError(f"{name!r} is another adapter, which the server was started with.", param="lora_name")

    async def unload(self, name: str) -> None:
        """Unregister a name and unload its adapter from schedulers. Requests in flight finish.

        Raises ModelNotFoundError, BadRequestError.
        """
        if name in self._configured:
            raise BadRequestError(f"The server was started with the adapter {name!r}.", param="lora_name")
        bases = self._bases
        if not bases:
            self._models.get(name)  # raises ApiError
        adapter = await self._names.remove(name, bases)
        if adapter is None:
            raise ModelNotFoundError(f"The adapter {name!r} does not exist.", param="lora_name")
        if all(each.lora != adapter.lora for each in await self.all()):
            forgotten = adapter.lora
            await self._control.broadcast(
                lambda number: UnloadLoRAAdapterReq(id=number, adapter=forgotten),
                self._readers(self._models.get(adapter.base)),
            )

    # Adapters from the options.

    @property
    def pending(self) -> list[str]:
        """Return the names of the adapters from the options that have been neither loaded nor refused."""
        return [name for name, each in self._configured.items() if each.adapter is None and not each.refusal]

    async def refusals(self) -> dict[str, str]:
        """Wait for all adapters from the options and return the refusals, by name."""
        while self.pending:
            if self._bases and not any(map(self._runs_adapters, self._models)):
                return dict.fromkeys(self._configured, _NONE_RUN)
            await asyncio.sleep(_POLL)  # polled: loading sends no event
        return {name: each.refusal for name, each in self._configured.items() if each.adapter is None}

    def tick(self, *, again: bool = False) -> None:
        """Load adapters from the options that are not loaded. Called periodically.

        Refused adapters are retried when the set of schedulers has changed, or with `again`.
        """
        able = frozenset(
            (each.peer, each.incarnation)
            for each in self._fleet.schedulers.values()
            if each.ready and each.limits and each.limits.max_loras
        )
        waiting = {
            name: configured
            for name, configured in self._configured.items()
            if configured.adapter is None and (again or configured.refused_by != able)
        }
        if waiting and able and self._bases and self._loading is None:
            self._loading = asyncio.create_task(self._load_configured(waiting, able))
            self._loading.add_done_callback(self._on_loaded)

    async def _load_configured(
        self, waiting: Mapping[str, _ConfiguredAdapter], able: frozenset[tuple[str, str]]
    ) -> None:
        for name, configured in waiting.items():
            try:
                self._check_free(name)
                model = self._base(None)
                lora = await self._read(model, configured.path)
            except UnavailableError as error:
                logger.debug("adapter %r is not loaded yet: %s", name, error.message)
                return
            except BadRequestError as error:
                if configured.refusal != error.message:
                    logger.error("adapter %r cannot be loaded: %s", name, error.message)
                configured.refusal, configured.refused_by = error.message, able
            else:
                configured.adapter = Adapter(name, model.name, lora, int(self._clock()))
                logger.info("adapter %r loaded sha256=%s", name, lora.sha256)

    def _on_loaded(self, task: asyncio.Task[None]) -> None:
        self._loading = None
        if not task.cancelled() and (error := task.exception()):
            logger.error("loading the adapters of --lora failed", exc_info=error)

    def _loaded(self, name: str, configured: _ConfiguredAdapter) -> Adapter:
        if configured.adapter is not None:
            return configured.adapter
        if not any(map(self._runs_adapters, self._models)):
            raise UnsupportedParameterError(_NONE_RUN, param="model")
        if configured.refusal:
            message = f"The adapter {name!r} cannot be used. {configured.refusal}"
            raise BadRequestError(message, param="model", code="invalid_lora")
        raise UnavailableError(f"The adapter {name!r} is still loading.", retry_after=1)

    # Base models and their schedulers.

    @property
    def _bases(self) -> list[str]:
        return [model.name for model in self._models]

    def _base(self, name: str | None) -> ServedModel:
        """Return the named model, or the only one with adapter support. Raises ApiError."""
        if name is not None:
            return _known(self._models, name)
        able = {model.identity.weights: model for model in reversed(list(self._models)) if self._runs_adapters(model)}
        if len(able) > 1:
            raise BadRequestError("Several models here can have adapters: say which.", param="base_model")
        if not able:
            self._models.get(next(iter(self._bases), ""))  # raises if no model is known yet
            raise UnsupportedParameterError(_NONE_RUN)
        return next(iter(able.values()))

    def _check_free(self, name: str) -> None:
        if name in self._bases:
            raise BadRequestError(f"{name!r} is the name of a model.", param="lora_name")

    def _with_adapter(self, adapter: Adapter) -> ServedModel:
        model = self._models.get(adapter.base)
        if not self._runs_adapters(model):
            raise UnsupportedParameterError(_NONE_RUN, param="model")
        return model.with_adapter(adapter.name, adapter.lora, adapter.created)

    def _runs_adapters(self, model: ServedModel) -> bool:
        """Return whether the model's schedulers support adapters, including those disconnected for now."""
        return bool(model.limits.max_loras or self._readers(model))

    def _readers(self, model: ServedModel) -> list[str]:
        weights = model.identity.weights
        return [each.peer for each in self._fleet.eligible_schedulers(weights, adapters=True)]

    async def _read(self, model: ServedModel, path: str) -> LoRAAdapter:
        """Load an adapter on every scheduler of a model. Raises BadRequestError, UnavailableError."""
        readers = self._readers(model)
        if not readers:
            if not self._runs_adapters(model):
                raise UnsupportedParameterError(_NONE_RUN)
            raise UnavailableError(f"No scheduler of {model.name!r} is ready to read it.", retry_after=1)
        answers = await self._control.broadcast(
            lambda number: LoadLoRAAdapterReq(id=number, adapter=LoRAAdapter(path)), readers, LOAD_TIMEOUT
        )
        if refusals := {peer: each.message for peer, each in answers.items() if each.answered and not each.ok}:
            raise BadRequestError(f"It cannot be read. {_joined(refusals)}.", param="lora_path", code="invalid_lora")
        if silent := {peer: each.message for peer, each in answers.items() if not each.answered}:
            raise UnavailableError(f"Not every scheduler has read it. {_joined(silent)}.", retry_after=1)
        return LoRAAdapter(path, _agreed(answers))


def _agreed(answers: Mapping[str, Answer]) -> str:
    """Return the SHA-256 that all schedulers agree on. Raises BadRequestError."""
    found = {each.sha256 for each in answers.values()}
    if len(found) > 1 or "" in found:
        differing = {peer: each.sha256 or "none" for peer, each in answers.items()}
        message = f"Schedulers find different files there, by their SHA-256. {_joined(differing)}."
        raise BadRequestError(message, param="lora_path", code="invalid_lora")
    return found.pop()


def _joined(messages: Mapping[str, str]) -> str:
    return ", ".join(f"{peer}: {what.rstrip('.')}" for peer, what in sorted(messages.items()))


def _validate(check: Callable[[str], None], text: str, param: str) -> None:
    try:
        check(text)
    except ValueError as error:
        raise BadRequestError(f"'{param}': {error}.", param=param) from None


def _known(models: ModelRegistry, name: str) -> ServedModel:
    try:
        return models.get(name)
    except ModelNotFoundError as error:
        error.param = "base_model"
        raise
