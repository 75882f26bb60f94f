"""Grammars of slots: matchers that follow the output, and masks of the tokens allowed next."""

import logging
import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from threading import Lock
from typing import Any
from weakref import WeakValueDictionary

import numpy as np
import torch

from tercet.kernels.ops.bitmask import pack_bitmask
from tercet.protocol.grammar_limits import FREE_SECONDS, SECONDS_PER_TOKEN
from tercet.scheduler.core.plan import SlotInit
from tercet.scheduler.device.staging import Array
from tercet.scheduler.executor.sampling.mask_threads import Account, Job, MaskThreads
from tercet.scheduler.executor.worker_options import WorkerOptions
from tercet.scheduler.grammar.backends import grammar_backend
from tercet.scheduler.grammar.cache import GrammarCache, grammar_loader
from tercet.scheduler.grammar.port import GrammarBackend, GrammarError, Masks, Matcher
from tercet.scheduler.models.config.model_config import DecoderShape

logger = logging.getLogger(__name__)

FAILED = (
    "The grammar cannot be followed to an end: it allows nothing that could come next, or costs too much to follow."
)
"""The only text that a client gets, for any cause."""
SPENT = (
    "The grammar is too costly: finding out which tokens may come next took more processor time than a request may "
    "use. Make the grammar less ambiguous, or ask for fewer choices."
)
_LEAST_WAIT = 0.002
"""Minimum seconds that a step waits for masks; it waits no longer than its forward pass took otherwise."""
_LONGEST_LATE = 30.0
"""Seconds after which a choice ends whose mask is still missing."""


@dataclass(eq=False)
class _Constraint:
    """The grammar of one slot. Its first job creates the matcher and advances it by the known output."""

    compiled: Future[Matcher]
    output: Sequence[int]
    account: Account
    end: int
    """Maximum tokens of prompt and output together."""
    fast_forward: bool
    ignore_eos: bool
    matcher: Matcher | None = None
    job: "Job[_Filled] | None" = None
    """The job of the current position: a choice whose mask was late uses it in a later step."""
    assumed: Sequence[int] = ()
    """The draft tokens of the job's rows."""
    expired: bool = False
    """The choice has waited too long for a mask."""


@dataclass(eq=False)
class _Filled:
    """The masks of a slot's rows, in order; None for a row that ends or fails."""

    words: list[Masks | None] = field(default_factory=list)
    faults: dict[int, str] = field(default_factory=dict)
    ends: set[int] = field(default_factory=set)


@dataclass(frozen=True)
class _Late:
    """A choice that is deferred until its mask is ready."""

    step: int
    """The step in which its mask was late."""
    constraint: _Constraint
    end: float
    """Monotonic time at which it has waited too long."""


@dataclass(eq=False)
class _Chain:
    """The rows of one slot in a step: all but the first have a draft token."""

    slot: int
    constraint: _Constraint
    rows: list[int] = field(default_factory=list)
    assumed: list[int] = field(default_factory=list)
    job: "Job[_Filled] | None" = None
    usable: int = 0
    """Rows for which the job has masks; a job of an earlier step may have had other draft tokens."""
    filled: _Filled | None = None
    """The job's result; None if it is late."""


@dataclass(eq=False)
class GrammarOutcome:
    """The outcome of a step's grammars, by row."""

    forced: dict[int, list[int]] = field(default_factory=dict)
    complete: list[int] = field(default_factory=list)
    errors: dict[int, str] = field(default_factory=dict)
    deferred: list[int] = field(default_factory=list)
    """Rows whose mask was late, so that they sampled no token."""


class SlotGrammars:
    """The matchers of all slots, and the threads that compute their masks."""

    def __init__(
        self,
        backend: GrammarBackend[Any],
        slots: int,
        vocab_size: int,
        *,
        fast_forward: bool = True,
        free_seconds: float = FREE_SECONDS,
    ) -> None:
        """Create it without grammars. A request's masks may use `free_seconds` of processor time plus an amount per
        token.
        """
        self._backend = backend
        self.loader = grammar_loader(GrammarCache(backend))
        self._copying = Lock()
        self._fast_forward = fast_forward
        self._free_seconds = free_seconds
        self._constraints: list[_Constraint | None] = [None] * slots
        self._constrained: set[int] = set()
        self._accounts: WeakValueDictionary[int, Account] = WeakValueDictionary()
        self._late: dict[int, _Late] = {}
        self._words = -(-vocab_size // 32)
        self.threads = MaskThreads()
        ends = torch.zeros(1, vocab_size, dtype=torch.bool)
        ends[0, [token for token in backend.end_ids if token < vocab_size]] = True
        self._end_words = pack_bitmask(ends).numpy()[0]

    @property
    def name(self) -> str:
        """Name of the grammar backend."""
        return self._backend.name

    @property
    def busy(self) -> bool:
        """Return whether `pop_ready` has a result, now or later."""
        return bool(self._late)

    def pop_ready(self, wait: float = 0.0) -> list[tuple[int, int]]:
        """Return (slot, step) of choices that were deferred in that step and can be planned again; each once.

        Wait up to `wait` seconds for the first. A choice that has used up its processor time or waited too long is
        returned, too: it then ends.
        """
        if wait and self._late:
            self.threads.await_any(
                [each.constraint.job for each in self._late.values() if each.constraint.job is not None], wait
            )
        now = time.monotonic()
        ready = []
        for slot, late in list(self._late.items()):
            job = late.constraint.job
            over = job is not None and not job.done.is_set() and (now > late.end or self._is_spent(job))
            if over and job is not None:
                late.constraint.expired = True
                self.threads.cancel(job)
            if over or job is None or job.done.is_set():
                ready.append((slot, late.step))
                self._late.pop(slot, None)
        return ready

    def introduce(self, inits: Sequence[SlotInit]) -> None:
        """Store the grammars of new choices, which should have been compiled by now."""
        for init in inits:
            sampling = init.sampling
            if (former := self._constraints[init.slot]) is not None and former.job is not None:
                self.threads.cancel(former.job)
            self._constraints[init.slot] = None
            self._late.pop(init.slot, None)
            self._constrained.discard(init.slot)
            if sampling.grammar is None:
                continue
            self._constrained.add(init.slot)
            self._constraints[init.slot] = _Constraint(
                compiled=self.loader.get(sampling.grammar),
                output=np.frombuffer(init.tokens, dtype="<i4")[init.prompt_tokens :].tolist(),
                account=self._accounts.setdefault(init.request, Account()),
                end=init.prompt_tokens + sampling.max_new_tokens,
                fast_forward=self._fast_forward and init.top_logprobs < 0,
                ignore_eos=sampling.ignore_eos,
            )

    def begin(self, step: int, slots: Array, assumed: Sequence[int | None] = ()) -> "ConstrainedRows | None":
        """Start to compute the masks of rows that will sample for `slots`. Return None if no slot has a grammar.

        `assumed` has the draft token before each row's sampled token, if any; such a row follows the slot's earlier
        rows.
        """
        if not self._constrained or self._constrained.isdisjoint(slots.tolist()):
            return None
        chains: dict[int, _Chain] = {}
        for row, slot in enumerate(slots.tolist()):
            constraint = self._constraints[slot]
            if constraint is None:
                continue
            chain = chains.setdefault(slot, _Chain(slot, constraint))
            chain.rows.append(row)
            if assumed and (token := assumed[row]) is not None:
                chain.assumed.append(token)
        for chain in sorted(chains.values(), key=lambda each: each.constraint.account.seconds):
            self._begin(chain)
        return ConstrainedRows(self, step, len(slots), [*chains.values()])

    def _begin(self, chain: "_Chain") -> None:
        constraint = chain.constraint
        if constraint.job is None:
            constraint.assumed = tuple(chain.assumed)
            constraint.job = self.threads.submit(constraint.account, lambda: self._fill(constraint, constraint.assumed))
        chain.job = constraint.job
        agreed = (mine == theirs for mine, theirs in zip(chain.assumed, constraint.assumed, strict=False))
        chain.usable = 1 + next((place for place, same in enumerate(agreed) if not same), len(constraint.assumed))

    def close(self) -> None:
        """End the threads."""
        self.loader.close()
        self.threads.close()

    def _is_spent(self, job: Job[_Filled]) -> bool:
        allowed = self._free_seconds + SECONDS_PER_TOKEN * job.account.tokens
        return self.threads.spent(job) > allowed

    def finish_step(self, chain: _Chain, step: int, *, late: bool, tokens: int = 0) -> None:
        """Record that a slot's choice continues from its mask, with `tokens` new tokens, or waits for a late mask."""
        chain.constraint.account.tokens += tokens
        if chain.filled is not None:
            chain.constraint.job = None
        if late:
            self._late[chain.slot] = _Late(step, chain.constraint, time.monotonic() + _LONGEST_LATE)

    def collect(self, count: int, chains: Sequence[_Chain], seconds: float) -> torch.Tensor:
        """Return the masks of a step's rows: all ones without a grammar, all zeros for rows that end or are late.

        Wait at most `seconds` for requests that are not known to be slow.
        """
        jobs = [chain.job for chain in chains if chain.job is not None]
        self.threads.wait(jobs, seconds)
        words = np.full((count, self._words), -1, dtype=np.int32)
        for chain, job in zip(chains, jobs, strict=True):
            words[chain.rows] = 0
            if self._is_spent(job) or (chain.constraint.expired and not job.done.is_set()):
                self.threads.cancel(job)
                chain.filled = _Filled(faults={0: SPENT})
            elif job.done.is_set():
                chain.filled = job.result()
                for row, mask in zip(chain.rows[: chain.usable], chain.filled.words, strict=False):
                    if mask is not None:
                        words[row] = mask
        return torch.from_numpy(words)

    def _fill(self, constraint: _Constraint, assumed: Sequence[int]) -> _Filled:
        """Compute the masks of a slot's rows, in a mask thread."""
        filled = _Filled()
        try:
            matcher = constraint.matcher = (
                self._matcher(constraint) if constraint.matcher is None else constraint.matcher
            )
            self._add(matcher, constraint, filled)
            for token in assumed:  # a draft token that the grammar rejects is an error of the copy only
                matcher = matcher.copy()
                matcher.advance([token])
                self._add(matcher, constraint, filled)
        except GrammarError as error:
            filled.faults[len(filled.words)] = str(error)
        return filled

    def _matcher(self, constraint: _Constraint) -> Matcher:
        """Create the matcher of a slot. Raise GrammarError."""
        compiled = constraint.compiled.result()
        with self._copying:
            matcher = compiled.copy()
        if constraint.output:
            matcher.advance(constraint.output)
        return matcher

    def _add(self, matcher: Matcher, constraint: _Constraint, filled: _Filled) -> None:
        """Add the mask of a matcher's current position."""
        masks: Masks = np.zeros((1, self._words), dtype=np.int32)
        self._backend.fill([matcher], masks)
        without_ends = masks & ~self._end_words
        place = len(filled.words)
        words: Masks | None = None
        if matcher.error:
            filled.faults[place] = matcher.error
        elif without_ends.any():
            words = (without_ends if constraint.ignore_eos else masks)[0]
        elif matcher.accepting:
            filled.ends.add(place)
        elif masks.any():  # an end token that the grammar itself requires
            words = masks[0]
        else:
            filled.faults[place] = "it allows no token"
        filled.words.append(words)


class ConstrainedRows:
    """The rows of one step that follow a grammar."""

    def __init__(self, grammars: SlotGrammars, step: int, count: int, chains: Sequence[_Chain]) -> None:
        """Start the clock for a step of `count` rows in all."""
        self._grammars = grammars
        self._step = step
        self._count = count
        self._chains = chains
        self._begun = time.monotonic()
        self._masks: torch.Tensor | None = None

    def masks(self) -> torch.Tensor:
        """Return int32 [rows of the step, ceil(vocab / 32)], on the host.

        The first call, after the forward pass, waits no longer than that took, or than `_LEAST_WAIT`. Rows whose masks
        are missing then are late: their masks allow no token.
        """
        if self._masks is None:
            wait = max(_LEAST_WAIT, time.monotonic() - self._begun)
            self._masks = self._grammars.collect(self._count, self._chains, wait)
        return self._masks

    def advance(self, tokens: Sequence[int], lengths: Sequence[int]) -> GrammarOutcome:
        """Advance matchers by the sampled tokens; `lengths` include these. Call it once, after `masks`."""
        outcome = GrammarOutcome()
        for chain in self._chains:
            late, taken = self._advance(chain, tokens, lengths, outcome)
            self._grammars.finish_step(chain, self._step, late=late, tokens=taken)
        return outcome

    def _advance(
        self, chain: _Chain, tokens: Sequence[int], lengths: Sequence[int], outcome: GrammarOutcome
    ) -> tuple[bool, int]:
        """Advance one slot's matcher over its rows, up to the first rejected draft token.

        Return whether it stops at a row whose mask is late, and the number of tokens taken.
        """
        filled, matcher, taken, row = chain.filled, chain.constraint.matcher, 0, chain.rows[0]
        if filled is None:
            outcome.deferred.append(row)
            return True, 0
        place = 0
        for place, row in enumerate(chain.rows):
            if place >= chain.usable:
                outcome.deferred.append(row)
                return True, taken
            if place in filled.faults or tokens[row] < 0 or matcher is None:
                break
            matcher.advance([tokens[row]])
            taken += 1
            if chain.assumed[place : place + 1] != [tokens[row]] or matcher.error or matcher.finished:
                break
        if place in filled.faults:
            _fail(row, filled.faults[place], outcome)
        elif place in filled.ends:
            outcome.complete.append(row)
        elif matcher is not None and tokens[row] >= 0:
            taken += _force(row, matcher, chain.constraint, lengths[row], outcome)
        return False, taken


def _force(row: int, matcher: Matcher, constraint: _Constraint, length: int, outcome: GrammarOutcome) -> int:
    """Advance by tokens that must follow a row's sequence of `length` tokens. Return the number of forced tokens."""
    room = constraint.end - length
    forced = matcher.forced()[:room] if constraint.fast_forward and room > 0 else []
    if forced:
        matcher.advance(forced)
    if matcher.error:
        _fail(row, matcher.error, outcome)
        return 0
    if forced:
        outcome.forced[row] = forced
    if matcher.finished:
        outcome.complete.append(row)
    return len(forced)


def _fail(row: int, error: str, outcome: GrammarOutcome) -> None:
    """Record an error of a row."""
    logger.warning("grammar failed, ending its choice")
    logger.debug("%s", error)  # contains user input
    outcome.errors[row] = SPENT if error is SPENT else FAILED


def slot_grammars(options: WorkerOptions, config: DecoderShape, ends: Sequence[int]) -> SlotGrammars | None:
    """Return the grammars of a worker's slots; None if its options refuse them."""
    backend = grammar_backend(options.grammar_backend, options.model, config.vocab_size, ends)
    if backend is None:
        return None
    return SlotGrammars(backend, options.slots, config.vocab_size, fast_forward=options.fast_forward)
