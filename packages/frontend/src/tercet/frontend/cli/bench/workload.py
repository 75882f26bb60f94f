"""Workloads: number of requests, their lengths, and the prefix that they share."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer

_SPACES = ("\u0120", "\u2581")
"""A leading space in byte-level and in SentencePiece's vocabularies."""
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
    least_input_tokens: int | None = None
    """With a number, lengths of prompts are uniform between it and `input_tokens`."""
    least_output_tokens: int | None = None

    def __post_init__(self) -> None:
        if min(self.concurrency, self.requests, self.input_tokens, self.output_tokens) < 1 or self.shared_tokens < 0:
            raise ValueError("a workload has at least one request, of at least one token in and out")
        ranges = ((self.least_input_tokens, self.input_tokens), (self.least_output_tokens, self.output_tokens))
        if any(least is not None and not 1 <= least <= most for least, most in ranges):
            raise ValueError("the least number of tokens is between 1 and the most")


@dataclass(frozen=True)
class Request:
    """Request of a workload."""

    prompt: str
    output_tokens: int


WORKLOADS = {
    "W1": Workload(concurrency=1, requests=1, input_tokens=128, output_tokens=128),
    "W2": Workload(concurrency=8, requests=32, input_tokens=128, output_tokens=128),
    "W3": Workload(concurrency=32, requests=64, input_tokens=128, output_tokens=64),
    "W4": Workload(concurrency=8, requests=32, input_tokens=32, output_tokens=32, shared_tokens=1024),
    "W5": Workload(concurrency=4, requests=8, input_tokens=4096, output_tokens=64),
    "W6": Workload(
        concurrency=16,
        requests=64,
        input_tokens=512,
        output_tokens=256,
        least_input_tokens=16,
        least_output_tokens=8,
    ),
}
"""W1: one reader. W2: a few. W3: many. W4: a few that share a long prefix. W5: long prompts. W6: mixed lengths."""
DEFAULT_WORKLOADS = ("W1", "W2", "W3", "W4")


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
    words = (token[1:] for token in vocabulary if token.startswith(_SPACES))
    found = sorted(word for word in words if word.isascii() and word.isalpha() and len(word) > 2)
    if len(found) < 100:
        raise ValueError(f"{path} has too few whole words to make prompts of")
    return found


def make_requests(workload: Workload, words: Sequence[str], seed: int) -> list[Request]:
    """Return the requests. Prompts of different seeds share nothing, so that no cache has seen them."""
    chance = random.Random(seed)  # noqa: S311 - nothing secret

    def text(count: int) -> str:
        return "".join(f" {chance.choice(words)}" for _ in range(count))

    def length(least: int | None, most: int) -> int:
        return most if least is None else chance.randint(least, most)

    shared = text(workload.shared_tokens)
    return [
        Request(
            shared + text(length(workload.least_input_tokens, workload.input_tokens)),
            length(workload.least_output_tokens, workload.output_tokens),
        )
        for _ in range(workload.requests)
    ]
