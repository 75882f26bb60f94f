"""Wordings of questions: frames, synonyms, openers, closers, noise words, typos, case and punctuation."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from random import Random

from tools.demo_model.facts import Fact, table

CHOICE = re.compile(r"\{([^{}]*)\}")
LETTERS = "abcdefghijklmnopqrstuvwxyz"


class Phraser:
    """Generator of questions with one random generator."""

    def __init__(self, rng: Random) -> None:
        """Read frames and words, and compile the synonyms into one pattern."""
        self.rng = rng
        self.frames: dict[str, list[str]] = table("frames")
        words = table("words")
        self.noise: list[str] = words["noise"]
        self.stop = frozenset(words["stop"])
        self.synonyms: dict[str, list[str]] = {}
        for group in words["synonyms"]:
            for word in group:
                self.synonyms.setdefault(word, []).extend(other for other in group if other != word)
        longest_first = sorted(self.synonyms, key=len, reverse=True)
        self.pattern = re.compile(r"(?<![\w/-])(" + "|".join(map(re.escape, longest_first)) + r")(?![\w/-])")

    def expand(self, text: str) -> str:
        """Choose one side of every {a|b}, innermost first."""
        while match := CHOICE.search(text):
            text = text[: match.start()] + self.rng.choice(match[1].split("|")) + text[match.end() :]
        return " ".join(text.split())

    def bare(self, fact: Fact) -> str:
        """Return a question for the fact, without noise."""
        kinds = [("asks", fact.asks), ("names", fact.names), ("tasks", fact.tasks), ("cases", fact.cases)]
        if fact.option:
            kinds.append(("options", fact.tasks))
        present = [(kind, pieces) for kind, pieces in kinds if pieces]
        kind, pieces = self.rng.choices(present, [_breadth(pieces) for _, pieces in present])[0]
        piece = self.rng.choices(pieces, [1 + piece.count("|") for piece in pieces])[0]
        return self.expand(piece if kind == "asks" else self.rng.choice(self.frames[kind]).replace("%", piece))

    def follow_up(self, name: str) -> str:
        """Return a short "and what about ...?" for a later turn."""
        return self.punctuated(self.expand(self.rng.choice(self.frames["follow"]).replace("%", name)))

    def noisy(self, text: str) -> str:
        """Return the same question as another user might type it."""
        rng = self.rng
        if rng.random() < 0.5:
            text = self.pattern.sub(self._synonym, text)
        words = text.split()
        if rng.random() < 0.12:
            words = [w for w in words if w not in self.stop or rng.random() < 0.5] or words
        if rng.random() < 0.05:
            rng.shuffle(words)
        if rng.random() < 0.25:
            for _ in range(rng.randint(1, 3)):
                words.insert(rng.randint(0, len(words)), rng.choice(self.noise))
        if rng.random() < 0.2:
            words = [*rng.choice(self.frames["openers"]).split(), *words]
        if rng.random() < 0.15:
            words += rng.choice(self.frames["closers"]).split()
        if rng.random() < 0.15:
            at = rng.randrange(len(words))
            words[at] = self._typo(words[at])
        return self.punctuated(" ".join(words))

    def punctuated(self, text: str) -> str:
        """Return the text with some case and punctuation."""
        rng = self.rng
        draw = rng.random()
        if draw < 0.55:
            text = text[:1].upper() + text[1:]
        elif draw < 0.75:
            text = text.lower()
        elif draw < 0.78:
            text = text.upper()
        if rng.random() < 0.6:
            text = re.sub(r"\bi\b", "I", text)
        return text + rng.choices(["?", "", ".", "!", "??", " ?"], [55, 28, 8, 4, 3, 2])[0]

    def _synonym(self, match: re.Match[str]) -> str:
        return self.rng.choice(self.synonyms[match[0]]) if self.rng.random() < 0.35 else match[0]

    def _typo(self, word: str) -> str:
        if len(word) < 4 or not word.isalpha():
            return word
        at = self.rng.randrange(1, len(word) - 1)
        edits = [
            word[:at] + word[at + 1 :],
            word[:at] + word[at] + word[at:],
            word[:at] + word[at + 1] + word[at] + word[at + 2 :],
            word[:at] + self.rng.choice(LETTERS) + word[at + 1 :],
        ]
        return self.rng.choice(edits)


def _breadth(pieces: Sequence[str]) -> float:
    """Return the weight of a kind of question: it grows less than in proportion to the pieces."""
    return math.sqrt(sum(1 + piece.count("|") for piece in pieces))
