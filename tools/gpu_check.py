"""Finds out, in stages, whether the GPU path is right and how near it is to the hardware's limits.

python -m tools.gpu_check [--stage NAME ...] [--out benchmarks/results]

Each stage runs in a process of its own for at most nine minutes and writes OUT/<device>-<stage>.json: its results, the
machine, the date, the command, and beside them the bandwidth and the rate that were measured in the same minute.
Correctness comes first: where it fails, nothing is measured. Without a GPU it refuses.
"""

import argparse
import datetime
import json
import re
import subprocess
import sys
import time
from pathlib import Path

import torch

from tercet.kernels.device import describe_machine
from tools.gpu_stages import FULL, SERVED_STAGES, STAGES, MakeEngine, Results, Scale, machine

LIMIT = 540.0
"""Seconds of a stage."""


def run_stage(name: str, scale: Scale, make_engine: MakeEngine) -> Results:
    """One stage's record, as it is written."""
    start = time.perf_counter()
    results = STAGES[name](scale) if name in STAGES else SERVED_STAGES[name](scale, make_engine)
    return {
        "stage": name,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": f"python -m tools.gpu_check --stage {name}",
        "machine": describe_machine(),
        "ceilings": machine(scale),
        "seconds": time.perf_counter() - start,
        "results": results,
    }


def write(record: Results, out: Path) -> Path:
    """Keep a record in a file of its own."""
    name = record["machine"].get("gpu 0", record["machine"].get("gpu", "none")).split(",")[0]
    path = out / f"{re.sub(r'[^a-z0-9]+', '-', name.lower()).strip('-')}-{record['stage']}.json"
    out.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    return path


def main(arguments: list[str]) -> int:
    """Run the stages asked for, or all; 1 where one fails, 2 without a GPU."""
    names = [*STAGES, *SERVED_STAGES]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stage", nargs="+", choices=names, default=names)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        print("no GPU is here: nothing was measured", file=sys.stderr)
        return 2
    if options.inside:
        from tercet.frontend.engine import Engine

        record = run_stage(options.stage[0], FULL, Engine)
        print(f"{write(record, options.out)}: {json.dumps(record['results'])}", flush=True)
        return 1 if record["results"].get("wrong") else 0
    return _each(options.stage, options.out)


def _each(stages: list[str], out: Path) -> int:
    failed = 0
    for stage in stages:
        command = [sys.executable, "-m", "tools.gpu_check", "--inside", "--stage", stage, "--out", str(out)]
        try:
            failed |= subprocess.run(command, timeout=LIMIT, check=False).returncode
        except subprocess.TimeoutExpired:
            print(f"{stage}: not done after {LIMIT:.0f} s", file=sys.stderr)
            failed = 1
        if failed and stage == "correctness":
            print(f"{stage} failed: the rest is not measured", file=sys.stderr)
            break
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
