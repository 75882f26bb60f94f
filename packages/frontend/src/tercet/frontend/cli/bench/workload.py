"""Workloads: number of requests, their lengths, and the prefix that they share."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer

_SPACE = "\u0120"
"""A leading space in byte-level vocabularies."""
_COMMON = (
    "time year people way day man thing woman life child world school state family student group country problem "
    "hand part place case week company system program question work government number night point home water room "
    "mother area money story fact month lot right study book eye job word business issue side kind head house"
)


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A number of requests, `concurrency` of which run at a time."""

    concurrency: int
    requests: int
    input_tokens: int
    """Tokens of each prompt after the shared prefix."""
    output_tokens: int
    shared_tokens: int = 0
    """Tokens at the beginning of every prompt."""

    def __post_init__(self) -> None:
        if min(self.concurrency, self.requests, self.input_tokens, self.output_tokens) < 1 or self.shared_tokens < 0:
            raise ValueError("a workload has at least one request, of at least one token in and out")


WORKLOADS = {
    "W1": Workload(concurrency=1, requests=1, input_tokens=128, output_tokens=128),
    "W2": Workload(concurrency=8, requests=32, input_tokens=128, output_tokens=128),
    "W3": Workload(concurrency=32, requests=64, input_tokens=128, output_tokens=64),
    "W4": Workload(concurrency=8, requests=32, input_tokens=32, output_tokens=32, shared_tokens=1024),
}
"""W1: one reader. W2: a few. W3: many. W4: a few that share a long prefix."""


def single_token_words(tokenizer: Path | None) -> Sequence[str]:
    """Return words that are one token each after a space, in the tokenizer of a model directory.

    Without a directory, return common English words, which most vocabularies have as tokens. Raises ValueError.
    """
    if tokenizer is None:
        return _COMMON.split()
    path = tokenizer / "tokenizer.json"
    if not path.is_file():
        raise ValueError(f"{path} is not there")
    vocabulary = Tokenizer.from_file(str(path)).get_vocab()
    words = (token[1:] for token in vocabulary if token.startswith(_SPACE))
    found = sorted(word for word in words if word.isascii() and word.isalpha() and len(word) > 2)
    if len(found) < 100:
        raise ValueError(f"{path} has too few whole words to make prompts of")
    return found


def prompts(workload: Workload, words: Sequence[str], seed: int) -> list[str]:
    """Return a prompt for each request. Prompts of different seeds share nothing, so that no cache has seen them."""
    chance = random.Random(seed)  # noqa: S311 - nothing secret

    def text(count: int) -> str:
        return "".join(f" {chance.choice(words)}" for _ in range(count))

    shared = text(workload.shared_tokens)
    return [shared + text(workload.input_tokens) for _ in range(workload.requests)]
