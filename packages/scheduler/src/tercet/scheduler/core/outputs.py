"""Outputs of a step: rows of new tokens, collected into one message for each detokenizer."""

from array import array
from collections.abc import Sequence

from tercet.protocol.backlog import Outgoing
from tercet.protocol.messages.messages import BatchTokenIDOutput, FirstRow, Message
from tercet.protocol.messages.values import FinishReason, FinishType, Logprobs, pack_floats, pack_ints
from tercet.scheduler.core.request import Req

_NO_LOGPROB = float("nan")


class RowBatch:
    """Rows for one detokenizer."""

    def __init__(self) -> None:
        self.rids: list[str] = []
        self.indices = array("i")
        self.attempts = array("i")
        self.positions = array("i")
        self.offsets = array("i", [0])
        self.token_ids = array("i")
        self.openings: list[FirstRow] = []
        self.finishes: dict[int, FinishReason] = {}
        self.logprobs: dict[int, Logprobs] = {}

    def add(self, req: Req, tokens: "array[int]") -> int:
        """Add a row; return its number."""
        self.rids.append(req.rid)
        self.indices.append(req.index)
        self.attempts.append(req.attempt)
        self.positions.append(req.sent)
        self.token_ids.extend(tokens)
        self.offsets.append(len(self.token_ids))
        return len(self.rids) - 1

    def add_next(self, columns: "_Columns", tokens: list[int]) -> None:
        """Add a row of one token for each choice of the columns."""
        reqs = columns.reqs
        self.rids += columns.rids
        self.indices += columns.indices
        self.attempts += columns.attempts
        self.positions += array("i", [req.sent for req in reqs])
        before = len(self.token_ids)
        self.token_ids += array("i", tokens)
        self.offsets += array("i", range(before + 1, before + 1 + len(reqs))) if before else columns.ends

    def message(self) -> BatchTokenIDOutput:
        """Return the message with all rows."""
        return BatchTokenIDOutput(
            rids=self.rids,
            indices=pack_ints(self.indices),
            attempts=pack_ints(self.attempts),
            positions=pack_ints(self.positions),
            offsets=pack_ints(self.offsets),
            token_ids=pack_ints(self.token_ids),
            openings=self.openings,
            finishes=self.finishes,
            logprobs=self.logprobs,
        )


class FastPathRows:
    """The fast-path choices of a step and the columns of their rows, kept while the next step has the same choices."""

    def __init__(self) -> None:
        self.reqs: list[Req] = []
        self.columns: dict[str, _Columns] = {}
        """Columns by detokenizer."""

    def update(self, reqs: list[Req]) -> None:
        """Set this step's fast-path choices.

        Call it for every step: a choice that changes its route is missing in one step.
        """
        if reqs != self.reqs:
            self.reqs = reqs
            groups: dict[str, list[int]] = {}
            for place, req in enumerate(reqs):
                groups.setdefault(req.detokenizer, []).append(place)
            self.columns = {detokenizer: _Columns(reqs, places) for detokenizer, places in groups.items()}


class _Columns:
    """Constant columns of the rows of fast-path choices for one detokenizer; `places` are their indices among all."""

    def __init__(self, all_reqs: Sequence[Req], places: list[int]) -> None:
        self.reqs = reqs = [all_reqs[place] for place in places]
        self.rids = [req.rid for req in reqs]
        self.indices = array("i", [req.index for req in reqs])
        self.attempts = array("i", [req.attempt for req in reqs])
        self.ends = array("i", range(1, len(reqs) + 1))  # offsets, if the message has no tokens before these
        self._places = places if len(places) < len(all_reqs) else None

    def of(self, tokens: list[int]) -> list[int]:
        """Select the tokens of these choices from the tokens of all fast-path choices."""
        return tokens if self._places is None else [tokens[place] for place in self._places]


class Outputs:
    """Collects the rows and the other messages of one call into the core. A choice has one row in it."""

    def __init__(self) -> None:
        self._batches: dict[str, RowBatch] = {}
        self._others: list[Outgoing] = []
        self._deferred: dict[Req, None] = {}

    def send(self, peer: str, message: Message) -> None:
        self._others.append((peer, message))

    def emit(self, req: Req) -> None:
        """Add a row with the unsent output tokens of `req`, its finish if any, and a FirstRow if it opens
        its attempt.
        """
        tokens = req.tokens[req.prompt_tokens + req.sent :]
        new = len(tokens)
        batch = self._batch(req.detokenizer)
        row = batch.add(req, tokens)
        req.sent += new
        if not req.opened:
            req.opened = True
            batch.openings.append(self._opening(req, row))
        if req.finish is not None:
            batch.finishes[row] = req.finish
        if new and req.token_logprobs:
            batch.logprobs[row] = joined(req.token_logprobs[-new:])

    def defer(self, req: Req) -> None:
        """Call `emit` at `collect`, unless `req` has ended by then: its end has emitted all tokens."""
        self._deferred[req] = None

    def emit_fast_path(self, rows: "FastPathRows", tokens: list[int]) -> None:
        """Add rows of fast-path choices with one new token each, `tokens[i]` for choice i, column by column."""
        for detokenizer, columns in rows.columns.items():
            self._batch(detokenizer).add_next(columns, columns.of(tokens))
        for req in rows.reqs:
            req.sent += 1

    def close(self, req: Req) -> None:
        """End a started attempt at its detokenizer, which would otherwise keep the choice."""
        if req.opened:
            batch = self._batch(req.detokenizer)
            row = batch.add(req, array("i"))
            batch.finishes[row] = FinishReason(FinishType.ABORT, message="a later attempt goes another way")

    def collect(self) -> list[Outgoing]:
        """Return all collected messages."""
        for req in self._deferred:
            if req.finish is None:
                self.emit(req)
        return [*self._others, *((peer, batch.message()) for peer, batch in self._batches.items())]

    def _batch(self, detokenizer: str) -> RowBatch:
        batch = self._batches.get(detokenizer)
        if batch is None:
            batch = self._batches[detokenizer] = RowBatch()
        return batch

    @staticmethod
    def _opening(req: Req, row: int) -> FirstRow:
        wanted = req.logprobs is not None and req.logprobs.prompt
        return FirstRow(
            row=row,
            frontend=req.frontend,
            decode_spec=req.decode_spec,
            prompt_tokens=req.prompt_tokens,
            cached_tokens=max(req.cached, 0),
            prompt_logprobs=joined([first_of(req), *req.prompt_logprobs]) if wanted and req.scored else None,
            queue_time=req.waited,
            chunks=req.chunks,
        )


def first_of(req: Req) -> Logprobs:
    """Return the entry of a prompt's first token, which has no log-probability: NaN."""
    top = req.logprobs.top if req.logprobs else 0
    return Logprobs(pack_floats([_NO_LOGPROB]), top, pack_ints([0] * top), pack_floats([_NO_LOGPROB] * top))


def joined(parts: list[Logprobs]) -> Logprobs:
    """Concatenate the log-probabilities of consecutive runs of tokens."""
    return Logprobs(
        b"".join(part.chosen for part in parts),
        parts[0].top,
        b"".join(part.top_ids for part in parts),
        b"".join(part.top_logprobs for part in parts),
        b"".join(part.times for part in parts),
    )
