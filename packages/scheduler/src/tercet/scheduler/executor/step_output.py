"""The output of a step, on its way from the device to the host."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

import torch

from tercet.kernels.pinned import pinned_empty
from tercet.protocol.messages.values import Logprobs, pack_floats, pack_ints
from tercet.scheduler.core.plan import Plan, StepResult
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
        self._prompts = [PromptLogprobs(part.row, *copies[3 * at : 3 * at + 3]) for at, part in enumerate(prompts)]

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
            prompt_logprobs={part.row: _packed(part.chosen, part.top_ids, part.top_logprobs) for part in self._prompts},
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


def _packed(chosen: torch.Tensor, top_ids: torch.Tensor, top_logprobs: torch.Tensor) -> Logprobs:
    ids, logprobs = pack_ints(top_ids.flatten().tolist()), pack_floats(top_logprobs.flatten().tolist())
    return Logprobs(pack_floats(chosen.tolist()), top_ids.shape[1], ids, logprobs)


def start_copies(
    tensors: Sequence[torch.Tensor], device: torch.device
) -> tuple[list[torch.Tensor], torch.Event | None]:
    """Start copies to the host. Return the host tensors and an event of their completion (None on a CPU).

    The copies have a stream of their own, which waits for this step only, so the next step neither delays nor waits for
    them.
    """
    if device.type != "cuda":
        return [*tensors], None
    stream = _copy_stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        hosts = [pinned_empty(tensor.shape, tensor.dtype, device) for tensor in tensors]
        copies = [host.copy_(tensor, non_blocking=True) for host, tensor in zip(hosts, tensors, strict=True)]
        copied = torch.Event(device=device)
        copied.record()
    for tensor in tensors:
        tensor.record_stream(stream)  # the allocator must not reuse the memory before it is read
    return copies, copied


@cache
def _copy_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
