"""What a step has to say: rows of new tokens, gathered into one message for each detokenizer."""

from array import array

from tercet.protocol.messages import BatchTokenIDOutput, Message, Opening
from tercet.protocol.values import FinishReason, FinishType, Logprobs, pack_floats, pack_ints
from tercet.scheduler.core.request import Req

Outgoing = tuple[str, Message, *tuple[bytes, ...]]
"""(peer, message, its raw frames)"""

_NO_LOGPROB = float("nan")


class RowBatch:
    """Rows on their way to one detokenizer."""

    def __init__(self) -> None:
        self.rids: list[str] = []
        self.indices = array("i")
        self.attempts = array("i")
        self.positions = array("i")
        self.offsets = array("i", [0])
        self.token_ids = array("i")
        self.openings: list[Opening] = []
        self.finishes: dict[int, FinishReason] = {}
        self.logprobs: dict[int, Logprobs] = {}

    def message(self) -> BatchTokenIDOutput:
        """The rows as they travel."""
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


class Outputs:
    """Collects the rows and the other messages of one call into the core."""

    def __init__(self) -> None:
        self._batches: dict[str, RowBatch] = {}
        self._others: list[Outgoing] = []

    def tell(self, peer: str, message: Message) -> None:
        """Add a message as it is."""
        self._others.append((peer, message))

    def emit(self, req: Req) -> None:
        """Add a row with all output tokens of `req` not yet sent, its finish if any, and what opens its attempt."""
        batch, row = self._row(req, req.tokens[req.prompt_tokens + req.sent :])
        new = req.output_tokens - req.sent
        req.sent += new
        if not req.opened:
            req.opened = True
            batch.openings.append(self._opening(req, row))
        if req.finish is not None:
            batch.finishes[row] = req.finish
        if new and req.token_logprobs:
            batch.logprobs[row] = joined(req.token_logprobs[-new:])

    def close(self, req: Req) -> None:
        """Tell the detokenizer that an attempt it has begun is over: it would hold the choice for ever."""
        if req.opened:
            batch, row = self._row(req, array("i"))
            batch.finishes[row] = FinishReason(FinishType.ABORT, message="a later attempt goes another way")

    def _row(self, req: Req, tokens: "array[int]") -> tuple[RowBatch, int]:
        batch = self._batches.get(req.detokenizer)
        if batch is None:
            batch = self._batches[req.detokenizer] = RowBatch()
        batch.rids.append(req.rid)
        batch.indices.append(req.index)
        batch.attempts.append(req.attempt)
        batch.positions.append(req.sent)
        batch.token_ids += tokens
        batch.offsets.append(len(batch.token_ids))
        return batch, len(batch.rids) - 1

    def take(self) -> list[Outgoing]:
        """Everything collected."""
        return [*self._others, *((peer, batch.message()) for peer, batch in self._batches.items())]

    @staticmethod
    def _opening(req: Req, row: int) -> Opening:
        wanted = req.logprobs is not None and req.logprobs.prompt
        return Opening(
            row=row,
            frontend=req.frontend,
            decode_spec=req.decode_spec,
            prompt_tokens=req.prompt_tokens,
            cached_tokens=max(req.cached, 0),
            prompt_logprobs=joined([first_of(req), *req.prompt_logprobs]) if wanted and req.scored else None,
        )


def first_of(req: Req) -> Logprobs:
    """The entry of a prompt's first token, which nothing predicts."""
    top = req.logprobs.top if req.logprobs else 0
    return Logprobs(pack_floats([_NO_LOGPROB]), top, pack_ints([0] * top), pack_floats([_NO_LOGPROB] * top))


def joined(parts: list[Logprobs]) -> Logprobs:
    """Log-probabilities of consecutive runs of tokens as one."""
    return Logprobs(
        b"".join(part.chosen for part in parts),
        parts[0].top,
        b"".join(part.top_ids for part in parts),
        b"".join(part.top_logprobs for part in parts),
    )
