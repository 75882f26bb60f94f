"""Times of decode steps with and without draft tokens, and the acceptance from which on draft tokens pay.

Times come from the clock readings that `schedule` gets, so the same events give the same decisions. A time is the
interval between two plans, and counts only between decodes with equally many plans in flight: idle time and prompts are
in none of them. A step with draft tokens is not computed ahead of its predecessor, which its time includes.
"""

from collections import deque
from typing import NamedTuple

KEPT = 8
"""Latest times of a kind of step. The fastest of them counts: others include interruptions."""
KNOWN = 4
"""Times of plain steps without which nothing is known."""
TRIALS = 3
"""Times of steps with draft tokens without which drafts are trials."""
TRIAL_GAIN = 1.0
"""Expected accepted tokens of a choice for which a trial is made."""
MOST_TRIES = 12
"""Trials after which draft tokens wait for `RETRY` plain steps, if their times could not be taken."""
RETRY = 1024
"""Plain steps after which draft tokens that did not pay are tried again: texts grow, and graphs are recorded."""
FEW = 4
"""Choices from which on one that waits for its result misses a step, while others are computed."""


class _Step(NamedTuple):
    """Plan whose time ends with the next plan. `choices` is 0 for a step that is not of decodes alone."""

    at: float
    choices: int
    drafts: bool
    in_flight: int


class StepCosts:
    """Measured times of steps, by the number of choices that decode."""

    def __init__(self) -> None:
        self._times: dict[tuple[int, bool], deque[float]] = {}
        self._last: _Step | None = None
        self._settled = False
        """The last plan is of the same kind as the one before it, or began with no plan in flight."""
        self._tries: dict[int, int] = {}
        self._plain: dict[int, int] = {}
        """Plain steps since draft tokens were last measured, by choices."""

    def observe(self, now: float, choices: int, *, drafts: bool, in_flight: int) -> None:
        """Note a plan with so many plans in flight before it; `choices` is 0 unless it has decodes alone."""
        step, last = _Step(now, choices, drafts, in_flight), self._last
        if last is not None and last.choices and choices and self._settled and last.in_flight == in_flight:
            ahead = in_flight > 0
            if now > last.at and (not ahead or step[1:] == last[1:]):
                self._times.setdefault((last.choices, last.drafts), deque(maxlen=KEPT)).append(now - last.at)
        self._settled = in_flight == 0 or (last is not None and step[1:] == last[1:])
        self._last = step
        if drafts:
            self._tries[choices] = self._tries.get(choices, 0) + 1
            self._plain[choices] = 0
        elif choices:
            self._count_plain(choices)

    def _count_plain(self, choices: int) -> None:
        """Count a plain step; after `RETRY`, forget the times with draft tokens."""
        self._plain[choices] = self._plain.get(choices, 0) + 1
        if self._plain[choices] >= RETRY:
            self._plain[choices] = self._tries[choices] = 0
            self._times.pop((choices, True), None)

    def least_gain(self, choices: int) -> float:
        """Return the number of accepted tokens that a choice must be expected to gain for a draft to pay.

        It pays for the longer step of all `choices` alone. The result is infinite where nothing is known.
        """
        plain, drafts = (self._times.get((choices, kind), ()) for kind in (False, True))
        if len(plain) < KNOWN:
            return float("inf")
        if len(drafts) < TRIALS:
            return TRIAL_GAIN if self._tries.get(choices, 0) < MOST_TRIES else float("inf")
        least = choices * max(0.0, min(drafts) / min(plain) - 1)
        return least if choices < FEW else max(1.0, least)
