"""`SlotGrammars`: follows the grammar of every slot that has one, and masks what its next token cannot be."""

import logging
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from tercet.kernels.ops.bitmask import pack_bitmask
from tercet.scheduler.core.plan import SlotInit
from tercet.scheduler.executor.uploads import Array
from tercet.scheduler.grammar.cache import GrammarCache
from tercet.scheduler.grammar.desk import GrammarDesk
from tercet.scheduler.grammar.port import GrammarBackend, GrammarError, Masks, Matcher

logger = logging.getLogger(__name__)

FAILED = (
    "The grammar cannot be followed to an end: it allows nothing that could come next, or costs too much to follow."
)
"""All that a client is told, whatever went wrong."""
_THREADS = 4


@dataclass(frozen=True, eq=False)
class _Guide:
    """The grammar of one slot. The matcher exists once it has seen the output so far."""

    matcher: Future[Matcher]
    end: int
    """Tokens of prompt and output that there can be."""
    fast_forward: bool
    ignore_eos: bool


@dataclass(eq=False)
class Outcome:
    """What the grammars say after a step, by row."""

    forced: dict[int, list[int]] = field(default_factory=dict)
    complete: list[int] = field(default_factory=list)
    errors: dict[int, str] = field(default_factory=dict)


class SlotGrammars:
    """The matchers of all slots, and the threads they are made and asked in."""

    def __init__(self, backend: GrammarBackend[Any], slots: int, vocab_size: int, *, fast_forward: bool = True) -> None:
        self._backend = backend
        self.desk = GrammarDesk(GrammarCache(backend))
        self._fast_forward = fast_forward
        self._guides: list[_Guide | None] = [None] * slots
        self._guided: set[int] = set()
        self._words = -(-vocab_size // 32)
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="grammar")
        ends = torch.zeros(1, vocab_size, dtype=torch.bool)
        ends[0, [token for token in backend.end_ids if token < vocab_size]] = True
        self._end_words = pack_bitmask(ends).numpy()[0]

    @property
    def name(self) -> str:
        """What reads the grammars."""
        return self._backend.name

    def introduce(self, inits: Sequence[SlotInit]) -> None:
        """Begin to make the matchers of choices that take slots, whose grammars should have been read by now."""
        for init in inits:
            sampling = init.sampling
            self._guides[init.slot] = None
            self._guided.discard(init.slot)
            if sampling.grammar is None:
                continue
            self._guided.add(init.slot)
            output = np.frombuffer(init.tokens, dtype="<i4")[init.prompt_tokens :].tolist()
            self._guides[init.slot] = _Guide(
                matcher=self._threads.submit(self._matcher, self.desk.reading(sampling.grammar), output),
                end=init.prompt_tokens + sampling.max_new_tokens,
                fast_forward=self._fast_forward and init.top_logprobs < 0,
                ignore_eos=sampling.ignore_eos,
            )

    def begin(self, slots: Array, assumed: Sequence[int | None] = ()) -> "GuidedRows | None":
        """Begin to fill the masks of rows that will sample for `slots`. None if no slot has a grammar.

        `assumed` is the token that each row assumes before the one it samples: it comes behind the slot's last row.
        """
        if not self._guided or self._guided.isdisjoint(slots.tolist()):
            return None
        rows = GuidedRows()
        last: dict[int, int] = {}
        for row, slot in enumerate(slots.tolist()):
            guide = self._guides[slot]
            if guide is None:
                continue
            rows.guides[row] = guide
            if assumed and (token := assumed[row]) is not None:
                rows.followers[last[slot]] = row, token
            last[slot] = row
        rows.masks = self._threads.submit(self._fill, len(slots), rows)
        return rows

    def close(self) -> None:
        """End the threads."""
        self.desk.close()
        self._threads.shutdown()

    def _matcher(self, read: Future[Matcher], output: Sequence[int]) -> Matcher:
        """In one of our threads. Raises GrammarError."""
        matcher = self.desk.copy(read)
        if output:
            matcher.advance(output)
        return matcher

    def _fill(self, count: int, rows: "GuidedRows") -> torch.Tensor:
        """In one of our threads: masks of all rows, all ones for those without a grammar, all zeros for those that end.

        Whatever this waits for was submitted before it, so it cannot wait for itself.
        """
        matchers = self._matchers(rows)
        masks: Masks = np.zeros((len(matchers), self._words), dtype=np.int32)
        self._backend.fill([*matchers.values()], masks)
        without_ends = masks & ~self._end_words
        goes_on = without_ends.any(axis=1).tolist()
        words = np.full((count, self._words), -1, dtype=np.int32)
        words[[*rows.guides]] = 0
        for index, (row, matcher) in enumerate(matchers.items()):
            if matcher.error:
                rows.faults[row] = matcher.error
            elif goes_on[index]:
                words[row] = (without_ends if rows.guides[row].ignore_eos else masks)[index]
            elif matcher.accepting:
                rows.ends.add(row)
            elif masks[index].any():  # an end token that the grammar itself asks for
                words[row] = masks[index]
            else:
                rows.faults[row] = "it allows no token"
        return torch.from_numpy(words)

    def _matchers(self, rows: "GuidedRows") -> dict[int, Matcher]:
        """Where each row stands: behind an assumed token, which may not fit, a copy of where the one before does."""
        found: dict[int, Matcher] = {}
        for first in rows.firsts:
            row = first
            try:
                rows.matchers[first] = found[first] = matcher = rows.guides[first].matcher.result()
                while row in rows.followers:
                    row, token = rows.followers[row]
                    matcher = matcher.copy()
                    matcher.advance([token])
                    found[row] = matcher
            except GrammarError as error:
                rows.faults[row] = str(error)
        return found


class GuidedRows:
    """The rows of one step that follow a grammar."""

    masks: Future[torch.Tensor]
    """int32 [rows of the step, ceil(vocab / 32)], on the host."""

    def __init__(self) -> None:
        self.guides: dict[int, _Guide] = {}
        self.followers: dict[int, tuple[int, int]] = {}
        """By row, the one behind it of the same slot, and the token that this one assumes."""
        self.matchers: dict[int, Matcher] = {}
        """Of rows that assume nothing."""
        self.faults: dict[int, str] = {}
        """Rows that cannot go on, should it come to them."""
        self.ends: set[int] = set()
        """Rows behind which nothing can come, should it come to them."""

    @property
    def firsts(self) -> list[int]:
        """Rows that assume nothing: one of each slot."""
        behind = {row for row, _ in self.followers.values()}
        return [row for row in self.guides if row not in behind]

    def settle(self, tokens: Sequence[int], lengths: Sequence[int]) -> Outcome:
        """Take what every row sampled, and the tokens it has with that; call it once, when nothing fills these rows."""
        outcome = Outcome()
        for first in self.firsts:
            self._settle(first, self.guides[first], tokens, lengths, outcome)
        return outcome

    def _settle(self, row: int, guide: _Guide, tokens: Sequence[int], lengths: Sequence[int], outcome: Outcome) -> None:
        """One slot, from the row that assumes nothing as far as those behind it were right."""
        matcher = self.matchers.get(row)
        while matcher is not None and row not in self.faults and tokens[row] >= 0:
            matcher.advance([tokens[row]])
            behind, assumed = self.followers.get(row, (row, -1))
            if assumed != tokens[row] or matcher.error or matcher.finished:
                break
            row = behind
        if row in self.faults:
            _fail(row, self.faults[row], outcome)
        elif row in self.ends:
            outcome.complete.append(row)
        elif matcher is not None and tokens[row] >= 0:
            _force(row, matcher, guide, lengths[row], outcome)


def _force(row: int, matcher: Matcher, guide: _Guide, length: int, outcome: Outcome) -> None:
    """Say what must follow a row's token, with which there are so many."""
    room = guide.end - length
    forced = matcher.forced()[:room] if guide.fast_forward and room > 0 else []
    if forced:
        matcher.advance(forced)
    if matcher.error:
        _fail(row, matcher.error, outcome)
        return
    if forced:
        outcome.forced[row] = forced
    if matcher.finished:
        outcome.complete.append(row)


def _fail(row: int, error: str, outcome: Outcome) -> None:
    """A row cannot go on."""
    logger.warning("a choice ends because its grammar fails")
    logger.debug("%s", error)  # holds what users wrote
    outcome.errors[row] = FAILED
