"""One grammar worker as the frontend sees it: started when first needed, and replaced when it had to die."""

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
    framed,
)
from tercet.protocol.messages.values import Grammar

PATIENCE = 20.0
"""Seconds to wait for a check, however little processor time it gets."""
START_PATIENCE = 60.0
_OUT_OF_MEMORY = {-signal.SIGABRT, -signal.SIGSEGV, -signal.SIGBUS}
"""What Rust ends with where there is no more heap, or no more stack."""


class WorkerDiedError(Exception):
    """It went away without a verdict. `why` is for the sender of what it had to check, and None if that is no cause."""

    def __init__(self, why: str | None, status: int) -> None:
        super().__init__(f"a grammar worker ended with {status}")
        self.why = why


class WorkerProcess:
    """Checks one grammar at a time."""

    def __init__(self) -> None:
        self._process: Process | None = None
        self._vocabulary = ""

    @property
    def pid(self) -> int | None:
        """Its process id, while there is one."""
        return self._process.pid if self._process is not None else None

    def speaks(self, model: ServedModel) -> bool:
        """Whether it knows the model's vocabulary."""
        return self._vocabulary == _vocabulary(model)

    async def check(self, grammar: Grammar, model: ServedModel, seconds: float) -> str:
        """What is wrong with a grammar; empty if nothing. Raises WorkerDiedError, TimeoutError, OSError."""
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
            await self._speak(model)
            return (await self._ask(Check(grammar=grammar, seconds=seconds), PATIENCE)).error
        except BaseException:
            # Also when nobody waits any more: what it is in the middle of can be in nobody's way.
            await self.stop()
            raise

    async def stop(self) -> None:
        """End the process, if there is one."""
        process, self._process, self._vocabulary = self._process, None, ""
        if process is not None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()

    async def _speak(self, model: ServedModel) -> None:
        """Have it know the model's vocabulary."""
        if self.speaks(model):
            return
        order = GrammarVocabulary(
            tokenizer_json=model.files.tokenizer_json,
            vocab_size=model.limits.vocab_size,
            eos=model.limits.eos_token_ids,
        )
        try:
            await self._ask(order, START_PATIENCE)
        except WorkerDiedError as error:
            error.why = None
            raise
        self._vocabulary = _vocabulary(model)

    async def _ask(self, order: Order, patience: float) -> GrammarVerdict:
        process = self._process
        assert process is not None
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            async with asyncio.timeout(patience):
                process.stdin.write(framed(order))
                await process.stdin.drain()
                size = int.from_bytes(await process.stdout.readexactly(LENGTH), "little")
                return decode_verdict(await process.stdout.readexactly(size))
        except (asyncio.IncompleteReadError, ConnectionError):
            status = await process.wait()
            raise WorkerDiedError(_why(status), status) from None


def _vocabulary(model: ServedModel) -> str:
    return f"{model.files.tokenizer_sha} {model.limits.vocab_size} {model.limits.eos_token_ids}"


def _environment() -> dict[str, str]:
    """The process's own, without API keys: what a worker reads is nobody's friend."""
    return {name: value for name, value in os.environ.items() if not name.startswith("TERCET_")}


def _why(status: int) -> str | None:
    if status == -signal.SIGPROF:
        return "it takes too long to compile"
    if status in _OUT_OF_MEMORY:
        return "it takes too much memory to compile"
    return None
