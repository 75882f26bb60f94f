"""Check of grammars before schedulers receive them, in helper processes that may hang or crash.

Results are cached, and concurrent requests with the same grammar share one check.
"""

import asyncio
import hashlib
from collections import OrderedDict

from tercet.frontend.errors import BadRequestError
from tercet.frontend.helper.pool import HelperPool
from tercet.frontend.helper.process import HelperDiedError
from tercet.frontend.model.served_model import ServedModel
from tercet.frontend.structured_output.worker_process import WorkerProcess
from tercet.protocol.messages.values import Grammar

MAX_RESULTS = 4096


class GrammarChecker:
    """Pool of up to `workers` processes, started on demand. Checks beyond `max_waiting` are refused.

    A check gets `seconds` of processor time.
    """

    def __init__(
        self, workers: int = 2, max_waiting: int = 64, seconds: float = 2.0, max_results: int = MAX_RESULTS
    ) -> None:
        self._max_results = max_results
        self._seconds = seconds
        self._pool = HelperPool([WorkerProcess() for _ in range(workers)], max_waiting, "grammars")
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
        await self._pool.close()

    @property
    def pids(self) -> list[int]:
        return self._pool.pids

    def _task(self, key: str, grammar: Grammar, model: ServedModel) -> asyncio.Task[str]:
        task = self._running.get(key)
        if task is None:
            task = self._running[key] = asyncio.create_task(self._check(grammar, model))
            task.add_done_callback(lambda done: self._on_check_done(key, done))
        return task

    async def _check(self, grammar: Grammar, model: ServedModel) -> str:
        try:
            return await self._pool.run(
                lambda worker: worker.check(grammar, model, self._seconds), lambda worker: worker.has_vocabulary(model)
            )
        except HelperDiedError as error:
            return f"it takes too {error.why} to compile"

    def _on_check_done(self, key: str, task: asyncio.Task[str]) -> None:
        del self._running[key]
        if not task.cancelled() and task.exception() is None:
            self._results[key] = task.result()
            if len(self._results) > self._max_results:
                self._results.popitem(last=False)


def _key(grammar: Grammar, model: ServedModel) -> str:
    limits = model.limits
    what = f"{model.files.tokenizer_sha} {limits.vocab_size} {limits.eos_token_ids} {grammar.kind} {grammar.text}"
    return hashlib.sha256(what.encode()).hexdigest()
