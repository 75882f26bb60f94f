"""Corpus: conversations written from one seed, without the questions kept for evaluation."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from random import Random

from tools.demo_model.conversations import Conversation, Writer
from tools.demo_model.facts import HERE, normalised, read_questions

EVALUATION_FILES = ("heldout.jsonl", "dev.jsonl")


def kept_out() -> frozenset[str]:
    """Return the evaluation questions, normalized."""
    return frozenset(normalised(q.text) for name in EVALUATION_FILES for q in read_questions(HERE / name))


def write_corpus(count: int, seed: int) -> list[Conversation]:
    """Return `count` conversations; one that contains an evaluation question is discarded."""
    writer, forbidden = Writer(Random(seed)), kept_out()
    corpus = list(islice(_allowed(writer, forbidden), count))
    check_kept_out(corpus, forbidden)
    return corpus


def _allowed(writer: Writer, forbidden: frozenset[str]) -> Iterator[Conversation]:
    while True:
        conversation = writer.write()
        if all(normalised(text) not in forbidden for text in conversation.user_texts()):
            yield conversation


def check_kept_out(corpus: Iterable[Conversation], forbidden: frozenset[str]) -> None:
    """Assert that no evaluation question, normalised, is in the corpus."""
    for conversation in corpus:
        for text in conversation.user_texts():
            assert normalised(text) not in forbidden, f"evaluation question in the corpus: {text!r}"


if __name__ == "__main__":
    for sample in write_corpus(40, seed=0):
        print(sample.text or "\n".join(f"{m['role']}: {m['content'] or m.get('tool_calls')}" for m in sample.messages))
        print()
