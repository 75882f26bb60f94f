"""Order of the stages when a GPU is there for few minutes: the most wanted records come first.

A stage is expected to take the seconds of its record on an H200 with nothing compiled, or a guess. It is begun only if
that much time is left, so that short stages use the time that a longer one would not fit into.
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

STARTING = 12.0
"""Seconds in which a stage loads torch and measures the ceilings."""

MARGIN = 5.0
"""Seconds at the end of the time, in which the last record is written and the table printed."""


@dataclass(frozen=True)
class Turn:
    """Stage with its expected seconds after the start, and whether a record shows them."""

    stage: str
    seconds: float
    recorded: bool = True

    @property
    def expected(self) -> float:
        """Return all seconds of the stage."""
        return STARTING + self.seconds


TURNS = (
    Turn("correctness", 130),
    Turn("prefill", 10),
    Turn("quantised_times", 75, recorded=False),
    Turn("mixtures", 240, recorded=False),
    Turn("torch_kernels", 80, recorded=False),
    Turn("decode", 38),
    Turn("operations", 23),
    Turn("tuning", 60, recorded=False),
    Turn("adapter_times", 40, recorded=False),
    Turn("speculation_times", 30, recorded=False),
    Turn("quantised", 46),
    Turn("weights", 8),
    Turn("adapters", 10),
    Turn("speculation", 18),
    Turn("launches", 5),
    Turn("step", 4),
    Turn("model", 3),
    Turn("ready", 15),
    Turn("offline", 97),
    Turn("idle", 46),
    Turn("rotation", 70),
    Turn("shared_prefix", 29),
    Turn("small_models", 102),
    Turn("transformers", 131),
    Turn("machine", 0),
)
"""Every stage, the most wanted first. Each record has the figures of `machine`."""


def next_turn(wanted: Collection[str], seconds: float) -> Turn | None:
    """Return the first wanted stage that is expected to fit into the seconds that are left."""
    return next((turn for turn in TURNS if turn.stage in wanted and turn.expected <= seconds - MARGIN), None)


def planned(wanted: Sequence[str], minutes: float) -> Iterator[tuple[float, Turn]]:
    """Yield (second at which it begins, stage) of what the minutes have room for, if all takes as long as expected."""
    now, left = 0.0, set(wanted)
    while turn := next_turn(left, minutes * 60 - now):
        yield now, turn
        left.remove(turn.stage)
        now += turn.expected


def plan_text(wanted: Sequence[str], minutes: float) -> str:
    """Return the plan of some minutes as lines: when a stage begins, its name and its expected seconds."""
    lines, end = [f"{'begins':>6}  {'stage':18} {'seconds':>7}"], 0.0
    turns = list(planned(wanted, minutes))
    for begin, turn in turns:
        guess = "" if turn.recorded else "  (a guess: no record)"
        lines.append(f"{_clock(begin):>6}  {turn.stage:18} {turn.expected:7.0f}{guess}")
        end = begin + turn.expected
    known = {turn.stage for _, turn in turns}
    lines.append(f"{_clock(end):>6}  end, of {minutes:g} minutes")
    if missing := [turn.stage for turn in TURNS if turn.stage in set(wanted) - known]:
        lines.append(f"no room: {', '.join(missing)}")
    return "\n".join(lines)


def _clock(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02}"
