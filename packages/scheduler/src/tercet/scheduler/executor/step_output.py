"""The output of a step, on its way from the device to the host."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from tercet.protocol.messages.values import Logprobs, pack_floats, pack_ints
from tercet.scheduler.core.plan import Plan, StepResult
from tercet.scheduler.device.host_copies import start_copies
from tercet.scheduler.executor.sampling.sampler import Sampled, TokenLogprobs
from tercet.scheduler.executor.sampling.slot_grammars import GrammarOutcome

_HOST = torch.device("cpu")

AdvanceGrammars = Callable[[Sequence[int]], GrammarOutcome]
"""A function of the sampling rows' tokens, called once per step, that advances their grammars and returns the
outcome.
"""


@dataclass(frozen=True, eq=False)
class PromptLogprobs:
    """Log-probabilities of consecutive prompt tokens of one row."""

    row: int
    chosen: torch.Tensor  # float32 [tokens]
    top_ids: torch.Tensor  # int64 [tokens, top]
    top_logprobs: torch.Tensor  # float32 [tokens, top]
    times: Callable[[], bytes] = bytes
    """Returns `Logprobs.times`, which is computed on the host."""


def no_logprobs(row: int) -> PromptLogprobs:
    """Return those of a row that computes no prompt token with a log-probability."""
    return PromptLogprobs(row, torch.empty(0), torch.empty(0, 0), torch.empty(0, 0))


class StepOutput:
    """A `Pending` step: its copies to the host are in progress, and `result` waits for them."""

    def __init__(
        self,
        plan: Plan,
        sampling_rows: Sequence[int],
        sampled: Sampled | None,
        prompts: list[PromptLogprobs],
        advance: AdvanceGrammars | None = None,
        device: torch.device = _HOST,
        fault: str = "",
    ):
        """Start the copies. The step runs on `device` even if nothing is copied; `fault` is that of `StepResult`."""
        self._step = plan.step
        self._fault = fault
        self._rows = len(plan.rows)
        self.encoded: dict[int, int] = {}
        self._sampling_rows = sampling_rows
        self._advance = advance
        self._result: StepResult | None = None
        left = [] if sampled is None else [sampled.tokens]
        logprobs = None if sampled is None else sampled.logprobs
        if logprobs is not None:
            left += [logprobs.chosen, logprobs.top_ids, logprobs.top_logprobs]
        for part in prompts:
            left += [part.chosen, part.top_ids, part.top_logprobs]
        copies, self._copied = start_copies(left, device)
        self._tokens = None if sampled is None else copies.pop(0)
        self._logprobs: TokenLogprobs | None = None
        if logprobs is not None:
            self._logprobs = TokenLogprobs(logprobs.rows, logprobs.tops, *copies[:3])
            del copies[:3]
        self._prompts = []
        for part in prompts:
            chosen, top_ids, top_logprobs = (copies.pop(0) for _ in range(3))
            self._prompts.append(PromptLogprobs(part.row, chosen, top_ids, top_logprobs, part.times))

    def result(self) -> StepResult:
        """Wait for the copies and return the step's result."""
        if self._result is None:
            self._result = self._wait()
        return self._result

    def _wait(self) -> StepResult:
        if self._copied is not None:
            self._copied.synchronize()
        sampled = [] if self._tokens is None else self._tokens.tolist()
        token_ids = sampled
        if len(sampled) < self._rows:
            token_ids = [-1] * self._rows
            for row, token in zip(self._sampling_rows, sampled, strict=True):
                token_ids[row] = token
        outcome = GrammarOutcome() if self._advance is None else self._advance(sampled)
        rows = self._sampling_rows
        return StepResult(
            step=self._step,
            token_ids=token_ids,
            logprobs=self._token_logprobs(token_ids),
            prompt_logprobs={
                part.row: _packed(part.chosen, part.top_ids, part.top_logprobs, part.times()) for part in self._prompts
            },
            forced={rows[index]: pack_ints(tokens) for index, tokens in outcome.forced.items()},
            complete=[rows[index] for index in outcome.complete],
            errors={rows[index]: error for index, error in outcome.errors.items()},
            fault=self._fault,
            deferred=[rows[index] for index in outcome.deferred],
            encoded=self.encoded,
        )

    def _token_logprobs(self, token_ids: list[int]) -> dict[int, Logprobs]:
        """Return the log-probabilities of each reporting row that has sampled a token."""
        given = self._logprobs
        if given is None:
            return {}
        result = {}
        for entry, (index, top) in enumerate(zip(given.rows, given.tops, strict=True)):
            row = self._sampling_rows[index]
            if token_ids[row] >= 0:
                ids, logprobs = given.top_ids[entry, :top], given.top_logprobs[entry, :top]
                result[row] = _packed(given.chosen[entry : entry + 1], ids[None], logprobs[None])
        return result


def _packed(chosen: torch.Tensor, top_ids: torch.Tensor, top_logprobs: torch.Tensor, times: bytes = b"") -> Logprobs:
    ids, logprobs = pack_ints(top_ids.flatten().tolist()), pack_floats(top_logprobs.flatten().tolist())
    return Logprobs(pack_floats(chosen.tolist()), top_ids.shape[1], ids, logprobs, times)
