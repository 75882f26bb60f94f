"""What a step leaves on the device, on its way to the host."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from tercet.protocol.values import Logprobs, pack_floats, pack_ints
from tercet.scheduler.core.plan import Plan, StepResult
from tercet.scheduler.executor.sampler import Sampled, TokenLogprobs
from tercet.scheduler.executor.slot_grammars import Outcome

Settle = Callable[[Sequence[int]], Outcome]
"""Shows the grammars what the sampling rows gave, and does what they say; once for each step."""


@dataclass(frozen=True, eq=False)
class PromptLogprobs:
    """Log-probabilities of consecutive prompt tokens of one row, on the host."""

    row: int
    chosen: torch.Tensor  # float32 [tokens]
    top_ids: torch.Tensor  # int64 [tokens, top]
    top_logprobs: torch.Tensor  # float32 [tokens, top]


class StepOutput:
    """A step that was started: its copies to the host are under way, and `result` waits for them. A `Pending`."""

    def __init__(
        self,
        plan: Plan,
        sampling_rows: Sequence[int],
        sampled: Sampled | None,
        prompts: list[PromptLogprobs],
        settle: Settle | None = None,
    ):
        self._step = plan.step
        self._rows = len(plan.rows)
        self._sampling_rows = sampling_rows
        self._prompts = prompts
        self._settle = settle
        self._result: StepResult | None = None
        self._tokens = None if sampled is None else _to_host(sampled.tokens)
        self._logprobs = None
        if sampled is not None and (given := sampled.logprobs) is not None:
            values = (_to_host(given.chosen), _to_host(given.top_ids), _to_host(given.top_logprobs))
            self._logprobs = TokenLogprobs(given.rows, given.tops, *values)
        self._copied: torch.Event | None = None
        if sampled is not None and sampled.tokens.is_cuda:
            self._copied = torch.Event(device=sampled.tokens.device)
            self._copied.record()

    def result(self) -> StepResult:
        """Wait for the copies, and say what the step gave."""
        if self._result is None:
            self._result = self._wait()
        return self._result

    def _wait(self) -> StepResult:
        if self._copied is not None:
            self._copied.synchronize()
        token_ids = [-1] * self._rows
        sampled = [] if self._tokens is None else self._tokens.tolist()
        for row, token in zip(self._sampling_rows, sampled, strict=True):
            token_ids[row] = token
        outcome = Outcome() if self._settle is None else self._settle(sampled)
        rows = self._sampling_rows
        return StepResult(
            step=self._step,
            token_ids=token_ids,
            logprobs=self._token_logprobs(token_ids),
            prompt_logprobs={part.row: _packed(part.chosen, part.top_ids, part.top_logprobs) for part in self._prompts},
            forced={rows[index]: pack_ints(tokens) for index, tokens in outcome.forced.items()},
            complete=[rows[index] for index in outcome.complete],
            errors={rows[index]: error for index, error in outcome.errors.items()},
        )

    def _token_logprobs(self, token_ids: list[int]) -> dict[int, Logprobs]:
        """One entry for each reporting row, but not where nothing was sampled."""
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


def _packed(chosen: torch.Tensor, top_ids: torch.Tensor, top_logprobs: torch.Tensor) -> Logprobs:
    ids, logprobs = pack_ints(top_ids.flatten().tolist()), pack_floats(top_logprobs.flatten().tolist())
    return Logprobs(pack_floats(chosen.tolist()), top_ids.shape[1], ids, logprobs)


def _to_host(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to("cpu", non_blocking=True)
