"""What is done to logits before sampling: penalties for repetition, and biases."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, eq=False, kw_only=True)
class Penalties:
    """Strengths, float32 [rows]; 1, 0 and 0 change nothing."""

    repetition: torch.Tensor
    frequency: torch.Tensor
    presence: torch.Tensor


def apply_penalties(
    logits: torch.Tensor, output_counts: torch.Tensor, prompt_seen: torch.Tensor, penalties: Penalties
) -> torch.Tensor:
    """Penalised logits float32 [rows, vocab].

    First repetition, as Hugging Face: over tokens of prompt or output, positive logits are divided and others
    multiplied. Then frequency and presence, as OpenAI: over output tokens only, minus frequency * count and minus
    presence. `output_counts` is int32 [rows, vocab], `prompt_seen` bool [rows, vocab].
    """
    said = output_counts > 0
    strength = penalties.repetition[:, None]
    repeated = torch.where(logits > 0, logits / strength, logits * strength)
    logits = torch.where(said | prompt_seen, repeated, logits)
    return logits - penalties.frequency[:, None] * output_counts - penalties.presence[:, None] * said


@dataclass(frozen=True, eq=False)
class TokenCounts:
    """What some sequences have said, a row each: tables that many steps read, and only grow."""

    output: torch.Tensor  # int32 [sequences, vocab]: how often the output has each token
    prompt: torch.Tensor  # bool [sequences, vocab]: whether the prompt has it


def apply_penalties_(
    logits: torch.Tensor, rows: torch.Tensor, counts: TokenCounts, sequences: torch.Tensor, penalties: Penalties
) -> None:
    """`apply_penalties` into logits[rows]: row rows[i] is of sequence sequences[i], both int64 [n], with strengths i.

    No row may come twice.
    """
    logits[rows] = apply_penalties(logits[rows], counts.output[sequences], counts.prompt[sequences], penalties)


def add_bias(logits: torch.Tensor, rows: torch.Tensor, tokens: torch.Tensor, bias: torch.Tensor) -> None:
    """Add bias[i] to logits[rows[i], tokens[i]], in place. A pair that comes twice is added twice."""
    logits.index_put_((rows, tokens), bias, accumulate=True)
