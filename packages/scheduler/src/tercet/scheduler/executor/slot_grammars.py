"""`SlotGrammars`: follows the grammar of every slot that has one, and masks what its next token cannot be."""

import logging
from collections.abc import Mapping, Sequence
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

    def begin(self, slots: Array) -> "GuidedRows | None":
        """Begin to fill the masks of rows that will sample for `slots`. None if no slot has a grammar."""
        if not self._guided or self._guided.isdisjoint(slots.tolist()):
            return None
        guides = {row: guide for row, slot in enumerate(slots.tolist()) if (guide := self._guides[slot]) is not None}
        rows = GuidedRows(guides)
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
        for row, guide in rows.guides.items():
            try:
                rows.matchers[row] = guide.matcher.result()
            except GrammarError as error:
                rows.fail(row, error)
        masks: Masks = np.zeros((len(rows.matchers), self._words), dtype=np.int32)
        self._backend.fill([*rows.matchers.values()], masks)
        without_ends = masks & ~self._end_words
        goes_on = without_ends.any(axis=1).tolist()
        words = np.full((count, self._words), -1, dtype=np.int32)
        words[[*rows.guides]] = 0
        for index, (row, matcher) in enumerate(rows.matchers.items()):
            if matcher.error:
                rows.fail(row, matcher.error)
            elif goes_on[index]:
                words[row] = (without_ends if rows.guides[row].ignore_eos else masks)[index]
            elif matcher.accepting:
                rows.outcome.complete.append(row)
            elif masks[index].any():  # an end token that the grammar itself asks for
                words[row] = masks[index]
            else:
                rows.fail(row, "it allows no token")
        return torch.from_numpy(words)


class GuidedRows:
    """The rows of one step that follow a grammar."""

    masks: Future[torch.Tensor]
    """int32 [rows of the step, ceil(vocab / 32)], on the host."""

    def __init__(self, guides: Mapping[int, _Guide]) -> None:
        self.guides = guides
        self.matchers: dict[int, Matcher] = {}
        self.outcome = Outcome()

    def fail(self, row: int, error: object) -> None:
        """A row cannot go on."""
        logger.warning("a choice ends because its grammar fails")
        logger.debug("%s", error)  # holds what users wrote
        self.outcome.errors[row] = FAILED

    def settle(self, tokens: Sequence[int], lengths: Sequence[int]) -> Outcome:
        """Take what every row sampled, and the tokens it has with that; call it once, when nothing fills these rows."""
        for row, matcher in self.matchers.items():
            if tokens[row] < 0 or row in self.outcome.errors:
                continue
            guide = self.guides[row]
            matcher.advance([tokens[row]])
            room = guide.end - lengths[row]
            forced = matcher.forced()[:room] if guide.fast_forward and room > 0 else []
            if forced:
                matcher.advance(forced)
                self.outcome.forced[row] = forced
            if matcher.error:
                self.outcome.forced.pop(row, None)
                self.fail(row, matcher.error)
            elif matcher.finished:
                self.outcome.complete.append(row)
        return self.outcome
