"""Replay of a scheduler's event log (`tercet-scheduler --event-log FILE`), which compares every plan.

python tools/replay.py FILE: exit status 0 if every plan is the same, 1 at the first difference. A crash dump that
cannot be replayed, because it has no tokens or not all events, is printed, one event a line.
"""

import sys
from collections.abc import Iterator
from itertools import chain, islice
from pathlib import Path

from tercet.scheduler.diagnostics.event_log import Committed, Event, Excerpt, Handled, Scheduled, read_events, replay


def main(path: Path) -> int:
    """Replay or print a log. Return the exit status."""
    with path.open("rb") as file:
        events = read_events(file)
        first = list(islice(events, 2))
        if len(first) == 2 and isinstance(excerpt := first[1], Excerpt):
            print(f"{excerpt.reason}: {excerpt.dropped} earlier events are missing")
            for event in events:
                print(described(event))
            return 0
        return compare(path, chain(first, events))


def compare(path: Path, events: Iterator[Event]) -> int:
    """Replay a complete log and print the result."""
    plans = rows = 0
    for line, logged, derived in replay(events):
        if logged != derived:
            print(f"{path}:{line}: the plan differs\n  logged:  {logged}\n  derived: {derived}")
            return 1
        plans += logged is not None
        rows += len(logged.rows) if logged is not None else 0
    print(f"{plans} plans with {rows} rows, every one derived again")
    return 0


def described(event: Event) -> str:
    """Return an event in one line."""
    match event:
        case Handled(arrivals):
            return "arrived: " + ", ".join(
                f"{type(each.message).__name__} {getattr(each.message, 'rid', '')}".strip() for each in arrivals
            )
        case Scheduled(None):
            return "no plan"
        case Scheduled(plan, now) if plan is not None:
            new = "".join(f" introduce slot {each.slot}: {len(each.tokens) // 4} tokens;" for each in plan.introduce)
            rows = ", ".join(f"{row.slot}:{row.start}+{row.count}" for row in plan.rows)
            other = f" weights {plan.weights};" if plan.weights else ""
            return f"step {plan.step} at {now:.3f} s:{other}{new} rows {rows}"
        case Committed(result):
            return f"result of step {result.step}: {len(result.token_ids)} rows {result.fault}".rstrip()
        case _:
            return str(event)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    sys.exit(main(Path(sys.argv[1])))
