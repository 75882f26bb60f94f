"""Log-probabilities to report: of the model's own distribution."""

import torch

from tercet.kernels.ops.sampling import rows_of_block, top_candidates


def token_logprobs(
    logits: torch.Tensor, tokens: torch.Tensor, top: int, rows: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(float32 [n] of `tokens`, int64 [n, top] the likeliest ids, float32 [n, top] of these), all log-probabilities.

    `tokens` int64 [n] are of rows 0 to n - 1 of logits [rows, vocab], or of those that `rows` int64 [n] names.
    This is the log-softmax of what it is given. Reported are always the model's raw logits, before temperature,
    penalties, bias and grammar. Equally likely tokens are listed by id.
    A block of rows is looked at at a time: temporaries take the same memory however many there are.
    """
    size = rows_of_block(logits.shape[1])
    parts = []
    for first in range(0, max(1, len(tokens)), size):
        block = slice(first, first + size)
        parts.append(_token_logprobs(logits[block if rows is None else rows[block]], tokens[block], top))
    chosen, ids, values = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
    return chosen, ids, values


def _token_logprobs(
    logits: torch.Tensor, tokens: torch.Tensor, top: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    total = logits.float().logsumexp(-1, keepdim=True)
    chosen = logits.gather(1, tokens[:, None]).float() - total
    if not top:
        empty = logits.new_empty((len(logits), 0))
        return chosen[:, 0], empty.long(), empty.float()
    values, ids = top_candidates(logits, top)
    return chosen[:, 0], ids, values.float() - total
