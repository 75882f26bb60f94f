"""Grammar worker as the frontend sees it, with the vocabulary that the worker has."""

from tercet.frontend.helper.process import HelperDiedError, HelperProcess
from tercet.frontend.model.served_model import ServedModel
from tercet.frontend.structured_output.pipe import Check, GrammarVocabulary, decode_verdict
from tercet.protocol.messages.values import Grammar

START_TIMEOUT = 60.0


class WorkerProcess:
    """Handle of one worker process, which checks one grammar at a time."""

    def __init__(self) -> None:
        self._process = HelperProcess("tercet.frontend.structured_output.worker")
        self._vocabulary = ""

    @property
    def pid(self) -> int | None:
        return self._process.pid

    def has_vocabulary(self, model: ServedModel) -> bool:
        """Return whether the worker has the model's vocabulary."""
        return self.pid is not None and self._vocabulary == _vocabulary(model)

    async def check(self, grammar: Grammar, model: ServedModel, seconds: float) -> str:
        """Return the fault of a grammar; empty for a valid grammar. Raises HelperDiedError, TimeoutError, OSError."""
        if not self.has_vocabulary(model):
            await self._send_vocabulary(model)
        return decode_verdict(await self._process.ask(Check(grammar=grammar, seconds=seconds))).error

    async def stop(self) -> None:
        """End the process, if there is one."""
        await self._process.stop()

    async def _send_vocabulary(self, model: ServedModel) -> None:
        """Send the model's vocabulary to the worker."""
        order = GrammarVocabulary(
            tokenizer_json=model.files.tokenizer_json,
            vocab_size=model.limits.vocab_size,
            eos=model.limits.eos_token_ids,
        )
        try:
            await self._process.ask(order, START_TIMEOUT)
        except HelperDiedError as error:
            error.why = None  # no grammar is at fault
            raise
        self._vocabulary = _vocabulary(model)


def _vocabulary(model: ServedModel) -> str:
    return f"{model.files.tokenizer_sha} {model.limits.vocab_size} {model.limits.eos_token_ids}"
