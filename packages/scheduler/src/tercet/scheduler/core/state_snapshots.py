"""Snapshots of recurrent states that running choices take, hold and restore.

A slot has one running state. Snapshots of a prompt are taken where another prompt branches off, at its end, and every
`LONG_PROMPT` tokens; those of an output every `OUTPUT_INTERVAL` tokens. They enter the radix cache with the pages of
their tokens. A choice with a grammar also keeps the state before its last known token, its checkpoint: that token is
computed again if the grammar's mask is late.

A state cannot forget a draft token. A step with draft tokens therefore takes a snapshot after each row of the choice
but the last, and the one after the last accepted token is restored before the next step.
"""

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from tercet.scheduler.core.cache.page_pools import PagePool
from tercet.scheduler.core.cache.prefix_cache import Match
from tercet.scheduler.core.cache.state_cache import StateRadixCache
from tercet.scheduler.core.plan import Plan, Row, StateRestore, StateSnapshot
from tercet.scheduler.core.request import Req

LONG_PROMPT = 4096
OUTPUT_INTERVAL = 64
_HELD_OUTPUTS = 2
"""Snapshots of its output that a choice holds: the newest may cover tokens behind the one that ends the output."""


@dataclass(slots=True)
class _Holding:
    """Snapshots of a running choice."""

    places: list[int]
    """Numbers of known tokens after which snapshots are still to be taken, ascending."""
    known: int
    """Tokens known at admission."""
    taken: deque[tuple[int, int]] = field(default_factory=deque)
    """(tokens, snapshot) that are not in the cache yet, ascending."""
    checkpoint: int = -1
    drafts: list[tuple[int, int]] = field(default_factory=list)
    """(tokens, snapshot) of a step with draft tokens, until these are verified."""
    drafted: int = 0
    """Tokens that this step computes, if all draft tokens are accepted."""


class StateSnapshots:
    """Snapshots of all running choices. Without a cache, there are only checkpoints."""

    def __init__(self, count: int, slots: int, page_size: int) -> None:
        """Create the pool. Raises ValueError for fewer snapshots than slots, each of which may need a checkpoint."""
        if count < slots:
            raise ValueError(f"{count} snapshots are too few for {slots} slots")
        self.pool = PagePool(count)
        self.cache: StateRadixCache | None = None
        self.holdings: dict[Req, _Holding] = {}
        self.pins: deque[tuple[int, list[int]]] = deque()
        """(step, snapshots): held until that step, which reads them, has committed."""
        self._restores: list[StateRestore] = []
        self._read: list[int] = []
        """Snapshots that the next plan reads."""
        self._page_size = page_size
        self._long = page_size * -(-LONG_PROMPT // page_size)
        self._interval = page_size * -(-OUTPUT_INTERVAL // page_size)
        self._unused_checkpoints = slots

    @property
    def read(self) -> list[int]:
        """Snapshots that the next plan or one in flight reads."""
        return [*self._read, *(each for _, pinned in self.pins for each in pinned)]

    def give_up(self, snapshot: int) -> None:
        """Release the cache's hold on a snapshot."""
        self.pool.release([snapshot])

    def can_admit(self, req: Req) -> bool:
        """Return whether `admit` would find a checkpoint."""
        return not req.constrained or self._make_room()

    def admit(self, req: Req, match: Match) -> None:
        """Restore the state of a match for a choice that has just got its slot, and choose its snapshots."""
        if match.node.snapshot >= 0:
            self.pool.hold([match.node.snapshot])
            self._read.append(match.node.snapshot)
            self._restores.append(StateRestore(req.slot, match.node.snapshot))
        holding = self.holdings[req] = _Holding(self._places(req, match), len(req.tokens))
        if req.constrained:
            [holding.checkpoint] = self.pool.allocate(1)
            self._unused_checkpoints -= 1

    def branch(self, req: Req, tokens: int) -> None:
        """Take a snapshot of a running choice after so many tokens, which it has not planned yet."""
        places = self.holdings[req].places
        if tokens not in places:
            insort(places, tokens)

    def next_place(self, req: Req, least: int) -> int:
        """Return the first number of tokens, from `least` on, after which the cache will have a snapshot; -1 if none.

        The choice's prompt is not published yet.
        """
        holding = self.holdings[req]
        places = [*(tokens for tokens, _ in holding.taken), *holding.places]
        at = bisect_left(places, least)
        return places[at] if at < len(places) else -1

    def draft(self, req: Req, wanted: int) -> int:
        """Set snapshots aside for up to `wanted` draft tokens behind a choice's planned row; return for how many."""
        holding, first = self.holdings[req], req.computed
        count = 0
        while count < wanted and self._make_room(self._unused_checkpoints):
            holding.drafts.append((first + count, self.pool.allocate(1)[0]))
            count += 1
        holding.drafted = last = first + count
        if count and self._is_due(last) and self._make_room(self._unused_checkpoints):
            holding.drafts.append((last, self.pool.allocate(1)[0]))
        return count

    def plan(
        self, step: int, rows: Sequence[Row], reqs: Sequence[Req]
    ) -> tuple[list[StateRestore], list[StateSnapshot]]:
        """Return the restores and snapshots of a plan with these rows."""
        snapshots = []
        for index, (row, req) in enumerate(zip(rows, reqs, strict=True)):
            holding = self.holdings[req]
            if drafts := holding.drafts:
                taken = [each for each in drafts if each[0] == row.start + 1]
            else:
                taken = [(tokens, self._take(holding, tokens)) for tokens in self._reached(holding, row)]
            if row.sample and holding.checkpoint >= 0 and not (drafts and row.start >= drafts[0][0]):
                taken.append((row.start + row.count - 1, holding.checkpoint))
            snapshots += [StateSnapshot(index, at - row.start, each) for at, each in sorted(taken) if each >= 0]
        if self._read:
            self.pins.append((step, self._read))
        restores, self._restores, self._read = self._restores, [], []
        return restores, snapshots

    def rewind(self, req: Req) -> None:
        """Restore the state before the last known token of a choice with a grammar."""
        self._restores.append(StateRestore(req.slot, self.holdings[req].checkpoint))

    def publish(self, req: Req, tokens: int) -> None:
        """Move the snapshots after up to `tokens` tokens, whose pages are cached, to the cache."""
        taken = self.holdings[req].taken
        while self.cache is not None and taken and taken[0][0] <= tokens:
            at, snapshot = taken.popleft()
            if not self.cache.attach(req.salt, req.cache_key(at), snapshot):
                self.pool.release([snapshot])

    def release(self, req: Req, tokens: int) -> None:
        """Publish the snapshots of a choice after up to `tokens` tokens, and free all others: it gives up its slot."""
        self._verify(req)
        self.publish(req, tokens)
        holding = self.holdings.pop(req)
        self.pool.release(snapshot for _, snapshot in holding.taken)
        if holding.checkpoint >= 0:
            self.pool.release([holding.checkpoint])
            self._unused_checkpoints += 1
        for each in [each for each in self._restores if each.slot == req.slot]:
            self._restores.remove(each)
            if each.snapshot in self._read:  # not a checkpoint
                self._read.remove(each.snapshot)
                self.pool.release([each.snapshot])

    def on_step_committed(self, plan: Plan, reqs: Sequence[Req]) -> None:
        """Release the snapshots that a plan, which has committed, has read. Undo its rejected draft tokens."""
        while self.pins and self.pins[0][0] <= plan.step:
            self.pool.release(self.pins.popleft()[1])
        for index in plan.draft_tokens:
            self._verify(reqs[index])

    def _verify(self, req: Req) -> None:
        """Restore the state after a choice's computed tokens, if its slot has that of rejected draft tokens, too.

        Keep snapshots of the output that are due, and free the others.
        """
        holding = self.holdings.get(req)
        if holding is None:
            return
        drafts, holding.drafts = holding.drafts, []
        for tokens, snapshot in drafts:
            if tokens == req.computed < holding.drafted:
                self.pool.hold([snapshot])
                self._read.append(snapshot)
                self._restores.append(StateRestore(req.slot, snapshot))
            if tokens <= req.computed and self._is_due(tokens):
                self._keep(holding, tokens, snapshot)
            else:
                self.pool.release([snapshot])

    def _places(self, req: Req, match: Match) -> list[int]:
        """Return the numbers of known tokens after which a choice takes snapshots."""
        if self.cache is None:
            return []
        first, end = match.count * self._page_size, (len(req.tokens) - 1) // self._page_size * self._page_size
        places = {match.cached * self._page_size, end, *range(self._long, end, self._long)}
        return sorted(place for place in places if place > first)

    def _reached(self, holding: _Holding, row: Row) -> list[int]:
        """Return the numbers of tokens in a row after which a snapshot is due, and remove them."""
        end = row.start + row.count
        if holding.places or self.cache is None:
            count = bisect_left(holding.places, end + 1)
            due, holding.places = holding.places[:count], holding.places[count:]
            return due
        last = end // self._interval * self._interval
        return [last] if last > max(row.start, holding.known) else []

    def _is_due(self, tokens: int) -> bool:
        """Return whether the cache gets a snapshot of an output after so many tokens."""
        return self.cache is not None and tokens % self._interval == 0

    def _take(self, holding: _Holding, tokens: int) -> int:
        """Return a free snapshot for the state after some tokens; -1 if all are needed elsewhere."""
        if not self._make_room(self._unused_checkpoints):
            return -1
        [snapshot] = self.pool.allocate(1)
        self._keep(holding, tokens, snapshot)
        return snapshot

    def _keep(self, holding: _Holding, tokens: int, snapshot: int) -> None:
        """Keep a snapshot for the cache. Release the oldest one of the output if these are more than it may hold."""
        holding.taken.append((tokens, snapshot))
        outputs = [each for each in holding.taken if each[0] > holding.known]
        if len(outputs) > _HELD_OUTPUTS:
            holding.taken.remove(outputs[0])
            self.pool.release([outputs[0][1]])

    def _make_room(self, spared: int = 0) -> bool:
        """Free a snapshot, unless no more than `spared` could be left besides."""
        cached = 0 if self.cache is None else self.cache.snapshot_count
        if len(self.pool.free_pages) + cached <= spared:
            return False
        while not self.pool.free_pages and self.cache is not None and self.cache.evict_snapshot():
            pass
        return bool(self.pool.free_pages)
