"""Grammar worker as the frontend sees it: started on demand, and replaced after it died."""

import asyncio
import contextlib
import os
import signal
import sys
from asyncio.subprocess import PIPE, Process

from tercet.frontend.model.served_model import ServedModel
from tercet.frontend.structured_output.pipe import (
    LENGTH,
    Check,
    GrammarVerdict,
    GrammarVocabulary,
    Order,
    decode_verdict,
    encode_frame,
)
from tercet.protocol.messages.values import Grammar

CHECK_TIMEOUT = 20.0
"""Seconds to wait for a check, however little processor time it gets."""
START_TIMEOUT = 60.0
_OUT_OF_MEMORY = {-signal.SIGABRT, -signal.SIGSEGV, -signal.SIGBUS}
"""Exit codes of Rust when the heap or the stack is exhausted."""


class WorkerDiedError(Exception):
    """Death of a worker without a result. `why` is the grammar's fault in words; None if it is not at fault."""

    def __init__(self, why: str | None, status: int) -> None:
        super().__init__(f"grammar worker died: status={status}")
        self.why = why


class WorkerProcess:
    """Handle of one worker process, which checks one grammar at a time."""

    def __init__(self) -> None:
        self._process: Process | None = None
        self._vocabulary = ""

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None else None

    def has_vocabulary(self, model: ServedModel) -> bool:
        """Return whether the worker has the model's vocabulary."""
        return self._vocabulary == _vocabulary(model)

    async def check(self, grammar: Grammar, model: ServedModel, seconds: float) -> str:
        """Return the fault of a grammar; empty for a valid grammar. Raises WorkerDiedError, TimeoutError, OSError."""
        try:
            if self._process is None:
                self._process = await asyncio.create_subprocess_exec(
                    sys.executable,
                    "-m",
                    "tercet.frontend.structured_output.worker",
                    stdin=PIPE,
                    stdout=PIPE,
                    env=_environment(),
                )
            await self._send_vocabulary(model)
            return (await self._ask(Check(grammar=grammar, seconds=seconds), CHECK_TIMEOUT)).error
        except BaseException:
            # Also on cancellation: a check that is abandoned half-way would block the worker.
            await self.stop()
            raise

    async def stop(self) -> None:
        """End the process, if there is one."""
        process, self._process, self._vocabulary = self._process, None, ""
        if process is not None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()

    async def _send_vocabulary(self, model: ServedModel) -> None:
        """Send the model's vocabulary to the worker."""
        if self.has_vocabulary(model):
            return
        order = GrammarVocabulary(
            tokenizer_json=model.files.tokenizer_json,
            vocab_size=model.limits.vocab_size,
            eos=model.limits.eos_token_ids,
        )
        try:
            await self._ask(order, START_TIMEOUT)
        except WorkerDiedError as error:
            error.why = None
            raise
        self._vocabulary = _vocabulary(model)

    async def _ask(self, order: Order, seconds: float) -> GrammarVerdict:
        process = self._process
        assert process is not None
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            async with asyncio.timeout(seconds):
                process.stdin.write(encode_frame(order))
                await process.stdin.drain()
                size = int.from_bytes(await process.stdout.readexactly(LENGTH), "little")
                return decode_verdict(await process.stdout.readexactly(size))
        except (asyncio.IncompleteReadError, ConnectionError):
            status = await process.wait()
            raise WorkerDiedError(_why(status), status) from None


def _vocabulary(model: ServedModel) -> str:
    return f"{model.files.tokenizer_sha} {model.limits.vocab_size} {model.limits.eos_token_ids}"


def _environment() -> dict[str, str]:
    """Return this process's environment without API keys, because a worker reads untrusted input."""
    return {name: value for name, value in os.environ.items() if not name.startswith("TERCET_")}


def _why(status: int) -> str | None:
    if status == -signal.SIGPROF:
        return "it takes too long to compile"
    if status in _OUT_OF_MEMORY:
        return "it takes too much memory to compile"
    return None
