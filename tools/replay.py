"""Replay of a scheduler's event log (`tercet-scheduler --event-log FILE`), which compares every plan.

python tools/replay.py FILE: exit status 0 if every plan is the same, 1 at the first difference.
"""

import sys
from pathlib import Path

from tercet.scheduler.event_log import read_events, replay


def main(path: Path) -> int:
    """Replay a log and print the result."""
    plans = rows = 0
    with path.open("rb") as file:
        for line, logged, derived in replay(read_events(file)):
            if logged != derived:
                print(f"{path}:{line}: the plan differs\n  logged:  {logged}\n  derived: {derived}")
                return 1
            plans += logged is not None
            rows += len(logged.rows) if logged is not None else 0
    print(f"{plans} plans with {rows} rows, every one derived again")
    return 0


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    sys.exit(main(Path(sys.argv[1])))
