"""Facts and words of the corpus, read from data/*.toml."""

from __future__ import annotations

import json
import re
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
DATA = HERE / "data"
TOPICS = (
    "about",
    "project",
    "running",
    "options",
    "endpoints",
    "requests",
    "messages",
    "wire",
    "scheduler",
    "recovery",
)


@dataclass(frozen=True)
class Fact:
    """Fact: pieces that become questions, and wordings of the answer."""

    id: str
    answers: tuple[str, ...]
    asks: tuple[str, ...] = ()  # whole questions
    names: tuple[str, ...] = ()  # noun phrases: "what is %"
    tasks: tuple[str, ...] = ()  # verb phrases: "how do i %"
    cases: tuple[str, ...] = ()  # clauses: "what happens when %"
    option: bool = False  # a command-line option: "which flag lets me %"


@dataclass(frozen=True)
class Question:
    """Evaluation question, with its expected substrings. A right answer contains at least one."""

    text: str
    expect: tuple[str, ...]

    def answered_by(self, reply: str) -> bool:
        """Return whether the reply contains an expected fact, ignoring case."""
        return any(fact.lower() in reply.lower() for fact in self.expect)


def table(name: str) -> dict[str, Any]:
    """Return one data file as a dictionary."""
    return tomllib.loads((DATA / f"{name}.toml").read_text(encoding="utf-8"))


def read_facts(topic: str) -> list[Fact]:
    """Return all facts of one topic file, in its order."""
    return [_fact(key, value) for key, value in table(topic).items()]


def _fact(key: str, value: dict[str, Any]) -> Fact:
    fields: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in value.items()}
    return Fact(id=key, **fields)


def read_questions(path: Path) -> list[Question]:
    """Return the evaluation questions of a JSON-lines file."""
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line]
    return [Question(row["question"], tuple(row["expect"])) for row in rows]


def normalised(text: str) -> str:
    """Return only lower-case words and digits: two questions with equal results are the same question."""
    return " ".join(re.findall(r"[a-z0-9]+", text.lower()))
