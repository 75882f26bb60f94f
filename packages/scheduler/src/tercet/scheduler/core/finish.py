"""Finish conditions that the scheduler checks: end and stop ids, and lengths. The detokenizer checks stop strings."""

from tercet.protocol.messages.values import FinishReason, FinishType
from tercet.scheduler.core.request import Req


def finish_after(req: Req, token: int, *, complete: bool = False) -> FinishReason | None:
    """Return why the choice ends with `token`, already appended, or None. `complete`: its grammar ends there."""
    if token in req.stop_ids and req.output_tokens >= req.sampling.min_new_tokens:
        return FinishReason(FinishType.STOP, token)
    if complete:
        return FinishReason(FinishType.STOP)
    if len(req.tokens) >= req.end:
        return FinishReason(FinishType.LENGTH)
    return None


def finish_at_arrival(req: Req) -> FinishReason | None:
    """Return the finish that a resumed choice had reached before its final answer was lost, or None."""
    return finish_after(req, req.tokens[-1]) if req.output_tokens else None
