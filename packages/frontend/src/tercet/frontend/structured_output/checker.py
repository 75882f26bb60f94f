"""Check of grammars before schedulers receive them, in worker processes that may hang or crash.

Results are cached, and concurrent requests with the same grammar share one check.
"""

import asyncio
import hashlib
import logging
from collections import Counter, OrderedDict
from weakref import WeakValueDictionary

from tercet.frontend.errors import BadRequestError, ServerError, UnavailableError
from tercet.frontend.http.auth import current_caller
from tercet.frontend.model.served_model import ServedModel
from tercet.frontend.structured_output.worker_process import WorkerDiedError, WorkerProcess
from tercet.protocol.messages.values import Grammar

logger = logging.getLogger(__name__)

MAX_RESULTS = 4096
_UNAVAILABLE = "Grammars cannot be checked now."
_MAX_ATTEMPTS = 2
"""Attempts at a check whose worker died, which may have died before it received the check."""


class GrammarChecker:
    """Pool of up to `workers` processes, started on demand. Checks beyond `max_waiting` are refused.

    A check gets `seconds` of processor time. One API key uses at most all workers but one, and half of the queue.
    """

    def __init__(
        self, workers: int = 2, max_waiting: int = 64, seconds: float = 2.0, max_results: int = MAX_RESULTS
    ) -> None:
        self._max_results = max_results
        self._seconds = seconds
        self._idle = [WorkerProcess() for _ in range(workers)]
        self._all = list(self._idle)
        self._worker_slots = asyncio.Semaphore(workers)
        self._slots_by_key: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()
        self._checks_by_key: Counter[str] = Counter()
        self._max_checks = workers + max_waiting
        self._results: OrderedDict[str, str] = OrderedDict()
        self._running: dict[str, asyncio.Task[str]] = {}

    async def check(self, grammar: Grammar, model: ServedModel, param: str = "response_format") -> None:
        """Raise BadRequestError if a grammar does not compile within limits, UnavailableError if the queue is full."""
        key = _key(grammar, model)
        fault = self._results.get(key)
        if fault is None:
            fault = await asyncio.shield(self._task(key, grammar, model))
        else:
            self._results.move_to_end(key)
        if fault:
            raise BadRequestError(f"The grammar is refused: {fault}.", param=param, code="invalid_grammar")

    async def close(self) -> None:
        tasks = list(self._running.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.gather(*(worker.stop() for worker in self._all))

    @property
    def pids(self) -> list[int]:
        return [worker.pid for worker in self._all if worker.pid is not None]

    def _task(self, key: str, grammar: Grammar, model: ServedModel) -> asyncio.Task[str]:
        task = self._running.get(key)
        if task is None:
            owner = current_caller().owner
            if len(self._running) >= self._max_checks or (
                owner and self._checks_by_key[owner] >= self._max_checks // 2
            ):
                raise UnavailableError("Too many grammars wait to be checked.", code="overloaded", retry_after=1)
            self._checks_by_key[owner] += 1
            task = self._running[key] = asyncio.create_task(self._check(grammar, model, self._key_slots(owner)))
            task.add_done_callback(lambda done: self._on_check_done(key, owner, done))
        return task

    def _key_slots(self, owner: str) -> asyncio.Semaphore:
        """Return a key's semaphore. It admits fewer checks than there are workers, so other keys find one free."""
        turns = self._slots_by_key.get(owner)
        if turns is None:
            workers = len(self._all)
            turns = self._slots_by_key[owner] = asyncio.Semaphore(max(1, workers - 1) if owner else workers)
        return turns

    async def _check(self, grammar: Grammar, model: ServedModel, key_slots: asyncio.Semaphore) -> str:
        async with key_slots, self._worker_slots:
            worker = next((each for each in self._idle if each.has_vocabulary(model)), self._idle[-1])
            self._idle.remove(worker)
            try:
                for _ in range(_MAX_ATTEMPTS):
                    try:
                        return await worker.check(grammar, model, self._seconds)
                    except WorkerDiedError as error:
                        logger.warning("%s reason=%s", error, error.why or "not the grammar, the check is repeated")
                        if error.why is not None:
                            return error.why
                    except TimeoutError:  # for want of a processor: its processor time was not used up
                        logger.warning("grammar worker timed out without processor time: lower the load")
                        raise UnavailableError(_UNAVAILABLE, code="overloaded", retry_after=1) from None
                    except OSError:
                        logger.exception("grammar worker could not be started")
                raise ServerError(_UNAVAILABLE)
            finally:
                self._idle.append(worker)

    def _on_check_done(self, key: str, owner: str, task: asyncio.Task[str]) -> None:
        del self._running[key]
        self._checks_by_key -= Counter([owner])
        if not task.cancelled() and task.exception() is None:
            self._results[key] = task.result()
            if len(self._results) > self._max_results:
                self._results.popitem(last=False)


def _key(grammar: Grammar, model: ServedModel) -> str:
    limits = model.limits
    what = f"{model.files.tokenizer_sha} {limits.vocab_size} {limits.eos_token_ids} {grammar.kind} {grammar.text}"
    return hashlib.sha256(what.encode()).hexdigest()
