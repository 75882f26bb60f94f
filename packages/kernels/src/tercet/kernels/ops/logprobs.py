"""Log-probabilities for output, from the model's own distribution."""

import torch

from tercet.kernels.ops.sampling import rows_of_block, top_candidates


def token_logprobs(
    logits: torch.Tensor, tokens: torch.Tensor, top: int, rows: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return log-probabilities: float32 [n] of `tokens`, and the `top` likeliest ids int64 and values float32 [n, top].

    `tokens` int64 [n] belong to rows 0 to n - 1 of logits [rows, vocab], or to the rows int64 [n] in `rows`. The result
    is the log-softmax of the given logits; callers pass raw logits, before temperature, penalties, bias and grammar.
    Equally likely tokens are ordered by id. Rows are processed in blocks, which bounds the memory of temporaries.
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
