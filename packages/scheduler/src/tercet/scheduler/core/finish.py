"""Who ends a choice on the scheduler's side: end and stop ids, and lengths. Stop strings are the detokenizer's."""

from tercet.protocol.messages.values import FinishReason, FinishType
from tercet.scheduler.core.request import Req


def finish_after(req: Req, token: int, *, complete: bool = False) -> FinishReason | None:
    """Why the choice ends with `token`, already appended; None while it goes on. `complete`: its grammar ends there."""
    if token in req.stop_ids and req.output_tokens >= req.sampling.min_new_tokens:
        return FinishReason(FinishType.STOP, token)
    if complete:
        return FinishReason(FinishType.STOP)
    if len(req.tokens) >= req.end:
        return FinishReason(FinishType.LENGTH)
    return None


def finish_at_arrival(req: Req) -> FinishReason | None:
    """The finish a resumed choice had reached before its final answer was lost."""
    return finish_after(req, req.tokens[-1]) if req.output_tokens else None
