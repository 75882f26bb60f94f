"""Keyword questions: a few words that distinguish a fact from the others, in any order."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from random import Random

from tools.demo_model.facts import Fact

QUESTION_WORDS = ("what", "how", "which", "where", "why", "what is it:", "can", "does", "i")
FRAMES = ("{}", "{}", *(word + " {}" for word in QUESTION_WORDS))
WORD = re.compile(r"(?<![\w/-])[a-z]{3,}(?![\w/-])")


class Keywords:
    """Words of each fact, weighted by how few other facts use them."""

    def __init__(self, rng: Random, facts: Iterable[Fact], stop: frozenset[str]) -> None:
        """Count the words of all facts."""
        self.rng = rng
        self.words = {fact.id: sorted(_words(fact) - stop) for fact in facts}
        self.uses = Counter(word for words in self.words.values() for word in words)

    def question(self, fact: Fact) -> str:
        """Return three to six words of the fact, sometimes with a question word."""
        words = self.words[fact.id]
        weights = [1 / self.uses[word] for word in words]
        drawn = dict.fromkeys(self.rng.choices(words, weights, k=self.rng.randint(3, 6)))
        return self.rng.choice(FRAMES).format(" ".join(drawn))


def _words(fact: Fact) -> set[str]:
    texts = (*fact.asks, *fact.names, *fact.tasks, *fact.cases, *fact.answers)
    return {word for text in texts for word in WORD.findall(text)}
