"""Log-probabilities to report: of the model's own distribution."""

import torch

from tercet.kernels.ops.sampling import top_candidates


def token_logprobs(
    logits: torch.Tensor, tokens: torch.Tensor, top: int, rows: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(of the tokens [rows], the `top` likeliest ids [rows, top], theirs [rows, top]), float32 and int64.

    Of all rows, or of those that `rows` names: int64, one for each of the tokens.
    This is the log-softmax of what it is given. Reported are always the model's raw logits, before temperature,
    penalties, bias and grammar. Equally likely tokens are listed by id.
    """
    if rows is not None:
        logits = logits[rows]
    total = logits.float().logsumexp(-1, keepdim=True)
    chosen = logits.gather(1, tokens[:, None]).float() - total
    if not top:
        empty = logits.new_empty((len(logits), 0))
        return chosen[:, 0], empty.long(), empty.float()
    values, ids = top_candidates(logits, top)
    return chosen[:, 0], ids, values.float() - total
