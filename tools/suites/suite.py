"""Suites of peers, their outcomes, and the failures that are expected of them."""

import fnmatch
import os
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

Status = Literal["passed", "failed", "skipped"]
Owner = Literal["ours", "theirs", "model"]
OWNERS: tuple[Owner, ...] = ("ours", "theirs", "model")
EXPECTED = Path(__file__).parent / "expected"


@dataclass(frozen=True)
class Outcome:
    """Outcome of one test."""

    test: str
    status: Status
    message: str = ""


@dataclass(frozen=True)
class Target:
    """Server under test."""

    url: str
    model: str
    key: str

    def environment(self) -> dict[str, str]:
        """Return the environment of a suite's process: that of this one, and where the server is."""
        return {**os.environ, "TERCET_URL": self.url, "TERCET_MODEL": self.model, "TERCET_KEY": self.key}


@dataclass(frozen=True)
class Suite:
    """A peer's suite. `fetch` brings it into an empty folder, `run` runs it from the folder that it was brought to."""

    name: str
    title: str
    fetch: Callable[[Path], None]
    run: Callable[[Path, Target], list[Outcome]]
    names: tuple[str, ...] = ()
    """Further names of the served model, which the suite's requests use."""


@dataclass(frozen=True)
class Expectation:
    """Failures with one reason: a fault of ours, a demand of theirs, or the answers of the small model."""

    tests: tuple[str, ...]
    """Patterns of the tests' names."""
    messages: tuple[str, ...]
    """Texts, one of which is in the failure's message."""
    owner: Owner
    reason: str

    def matches(self, failure: Outcome) -> bool:
        """Return whether both the name and the message are expected."""
        named = any(fnmatch.fnmatchcase(failure.test, pattern) for pattern in self.tests)
        return named and any(text in failure.message for text in self.messages)


@dataclass
class Verdict:
    """Outcomes of a suite, sorted by the expectations."""

    passed: list[Outcome] = field(default_factory=list)
    skipped: list[Outcome] = field(default_factory=list)
    expected: dict[Expectation, list[Outcome]] = field(default_factory=dict)
    unexpected: list[Outcome] = field(default_factory=list)
    unused: list[Expectation] = field(default_factory=list)

    def count(self, owner: Owner) -> int:
        """Return the number of failures of an owner."""
        return sum(len(outcomes) for each, outcomes in self.expected.items() if each.owner == owner)


def expectations(name: str) -> list[Expectation]:
    """Return the expected failures of a suite. Raises ValueError for an unknown owner or an empty text or reason."""
    path = EXPECTED / f"{name}.toml"
    if not path.exists():
        return []
    found = [
        Expectation(tuple(each["tests"]), tuple(each["messages"]), each["owner"], each["reason"])
        for each in tomllib.loads(path.read_text())["expected"]
    ]
    for each in found:
        if each.owner not in OWNERS or not all((each.tests, each.messages, *each.messages, each.reason)):
            raise ValueError(f"{path}: {each}")
    return found


def judge(outcomes: Sequence[Outcome], expected: Sequence[Expectation]) -> Verdict:
    """Sort outcomes. The first expectation that matches a failure explains it."""
    verdict = Verdict()
    for outcome in outcomes:
        if outcome.status == "passed":
            verdict.passed.append(outcome)
        elif outcome.status == "skipped":
            verdict.skipped.append(outcome)
        elif reason := next((each for each in expected if each.matches(outcome)), None):
            verdict.expected.setdefault(reason, []).append(outcome)
        else:
            verdict.unexpected.append(outcome)
    verdict.unused = [each for each in expected if each not in verdict.expected]
    return verdict


def report(suite: Suite, verdict: Verdict) -> str:
    """Return the verdict in Markdown: one row of counts, then a row for each reason."""
    counts = [len(verdict.passed), *(verdict.count(owner) for owner in OWNERS), len(verdict.unexpected)]
    cells = [suite.title, *map(str, [*counts, len(verdict.skipped)])]
    lines = [
        "| suite | passed | ours | theirs | model | unexpected | skipped |",
        "|---|---|---|---|---|---|---|",
        f"| {' | '.join(cells)} |",
        "",
        "| failed | whose | reason |",
        "|---|---|---|",
    ]
    lines += [f"| {len(found)} | {each.owner} | {each.reason} |" for each, found in verdict.expected.items()]
    return "\n".join(lines)
