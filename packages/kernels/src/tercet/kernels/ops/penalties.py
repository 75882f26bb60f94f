"""Changes of logits before sampling: repetition, frequency and presence penalties, and logit biases."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, eq=False, kw_only=True)
class Penalties:
    """Penalties of each row, float32 [rows]; 1, 0 and 0 change nothing."""

    repetition: torch.Tensor
    frequency: torch.Tensor
    presence: torch.Tensor


def apply_penalties(
    logits: torch.Tensor, output_counts: torch.Tensor, prompt_seen: torch.Tensor, penalties: Penalties
) -> torch.Tensor:
    """Return penalized logits float32 [rows, vocab].

    Repetition is first, as in Hugging Face: for tokens of prompt or output, positive logits are divided and others
    multiplied. Frequency and presence follow, as in OpenAI's API: for output tokens, minus frequency * count and minus
    presence. `output_counts` is int32 [rows, vocab], `prompt_seen` bool [rows, vocab].
    """
    in_output = output_counts > 0
    strength = penalties.repetition[:, None]
    repeated = torch.where(logits > 0, logits / strength, logits * strength)
    logits = torch.where(in_output | prompt_seen, repeated, logits)
    return logits - penalties.frequency[:, None] * output_counts - penalties.presence[:, None] * in_output


@dataclass(frozen=True, eq=False)
class TokenCounts:
    """Tokens of some sequences, a row each: tables that persist over steps and only grow."""

    output: torch.Tensor  # int32 [sequences, vocab]: number of occurrences in the output
    prompt: torch.Tensor  # bool [sequences, vocab]: token occurs in the prompt


def apply_penalties_(
    logits: torch.Tensor, rows: torch.Tensor, counts: TokenCounts, sequences: torch.Tensor, penalties: Penalties
) -> None:
    """Apply `apply_penalties` to logits[rows] in place.

    Row rows[i] belongs to sequence sequences[i], both int64 [n], and uses penalties i. Rows must be distinct.
    """
    logits[rows] = apply_penalties(logits[rows], counts.output[sequences], counts.prompt[sequences], penalties)


def add_bias(logits: torch.Tensor, rows: torch.Tensor, tokens: torch.Tensor, bias: torch.Tensor) -> None:
    """Add bias[i] to logits[rows[i], tokens[i]], in place. Repeated pairs accumulate."""
    logits.index_put_((rows, tokens), bias, accumulate=True)
