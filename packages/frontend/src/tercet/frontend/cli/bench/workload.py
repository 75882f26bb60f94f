"""What a load asks for: how many requests, how long, how much of them shared."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer

_SPACE = "\u0120"
"""How byte-level vocabularies write a leading space."""
_COMMON = (
    "time year people way day man thing woman life child world school state family student group country problem "
    "hand part place case week company system program question work government number night point home water room "
    "mother area money story fact month lot right study book eye job word business issue side kind head house"
)


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A number of requests, of which so many are under way at a time."""

    concurrency: int
    requests: int
    input_tokens: int
    """Of each prompt, after what all share."""
    output_tokens: int
    shared_tokens: int = 0
    """At the beginning of every prompt."""

    def __post_init__(self) -> None:
        if min(self.concurrency, self.requests, self.input_tokens, self.output_tokens) < 1 or self.shared_tokens < 0:
            raise ValueError("a workload has at least one request, of at least one token in and out")


WORKLOADS = {
    "W1": Workload(concurrency=1, requests=1, input_tokens=128, output_tokens=128),
    "W2": Workload(concurrency=8, requests=32, input_tokens=128, output_tokens=128),
    "W3": Workload(concurrency=32, requests=64, input_tokens=128, output_tokens=64),
    "W4": Workload(concurrency=8, requests=32, input_tokens=32, output_tokens=32, shared_tokens=1024),
}
"""One reader; a few; many; and a few who share a long beginning."""


def words_of(tokenizer: Path | None) -> Sequence[str]:
    """Words that are one token each after a space, in the tokenizer of a model directory.

    Without one these are common English words, most of which are a token in most vocabularies. Raises ValueError.
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
    """A prompt for each request. Another seed shares nothing with this one, so that no cache has seen it."""
    chance = random.Random(seed)  # noqa: S311 - nothing secret

    def text(count: int) -> str:
        return "".join(f" {chance.choice(words)}" for _ in range(count))

    shared = text(workload.shared_tokens)
    return [shared + text(workload.input_tokens) for _ in range(workload.requests)]
