"""Token ids for the smoke test of a hosted model."""

import itertools
from collections.abc import Collection

import torch

LONGEST = 96
"""Maximum tokens of the longer text, used where they cost little."""


_SHORTEST = 12


_WORK = 2e11
"""Floating-point operations of a forward pass that are cheap on a CPU."""


def text_length(parameters: int, context_length: int, device: torch.device) -> int:
    """Return the number of tokens of a model's text that can be tested at little cost."""
    affordable = LONGEST if device.type != "cpu" else int(_WORK / (2 * max(parameters, 1)))
    return min(max(affordable, _SHORTEST), LONGEST, context_length)


def trial_text(length: int, vocab_size: int, without: Collection[int] = ()) -> torch.Tensor:
    """Return token ids, int64 [length], `without` special ones."""
    ids = (place * 101 % vocab_size for place in itertools.count(1))
    usable = (token for token in ids if token not in without or len(without) >= vocab_size)
    return torch.tensor([*itertools.islice(usable, length)])
