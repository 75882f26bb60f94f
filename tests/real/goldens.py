"""Tokens of llama.cpp and transformers that `tools/real_goldens.py` wrote, and their comparison with others."""

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np

TOKENS = 24
"""Maximum tokens of an answer."""
MARGINS = {"llama.cpp": 0.25, "transformers": 0.002}
"""Difference of the log-probabilities of the two best tokens below which the other one may be chosen.

llama.cpp rounds activations to 8 bits, which moves differences by up to 0.23 here. transformers has float32.
"""


class Golden:
    """What others made of a prompt."""

    def __init__(self, record: dict[str, Any]) -> None:
        self.prompt: list[Any] = record["prompt"]
        """Number of tokens, and their digest."""
        self.answers: dict[str, dict[str, Any]] = {name: record[name] for name in MARGINS if name in record}
        self.perplexity: dict[str, float] = record.get("perplexity", {})

    def tokens(self, name: str) -> list[int]:
        tokens: list[int] = self.answers[name]["tokens"]
        return tokens

    def fault(self, name: str, tokens: Sequence[int]) -> str:
        """Return how tokens differ from a golden before its first near tie; empty if they do not."""
        answer = self.answers[name]
        places = zip(answer["tokens"], answer["first"], answer["second"], strict=True)
        for position, (token, first, second) in enumerate(places):
            if first - second < MARGINS[name]:
                return ""
            if position >= len(tokens) or tokens[position] != token:
                found = tokens[position] if position < len(tokens) else None
                return f"position {position}: {found} for {token}, by a margin of {first - second:.3f}"
        return "" if len(tokens) == len(answer["tokens"]) else "it goes on"


def digest(ids: Sequence[int]) -> list[Any]:
    """Return the number of tokens, and a hash of them."""
    return [len(ids), hashlib.sha256(np.array(ids, dtype="<i4").tobytes()).hexdigest()[:16]]
