"""Finds out, in stages, whether the GPU path is right and how near it is to the hardware's limits.

python -m tools.gpu_check [--stage NAME ...] [--out benchmarks/results]
python -m tools.gpu_check --table

Each stage runs in a process of its own for at most nine minutes and writes OUT/<device>-<stage>.json: its results, the
machine, the date, the command, and beside them the bandwidth and the rate that were measured in the same minute. It is
written again with every part of the results, so that a stage that is cut off keeps what it had.
Correctness comes first: where it fails, nothing is measured. Without a GPU it refuses.
"""

import argparse
import datetime
import json
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from tercet.kernels.device import describe_machine
from tools.gpu_stages import adapters, executor, kernels, quantised, serving, tuning, weights
from tools.gpu_stages.scale import FULL, Results, Scale
from tools.gpu_stages.serving import MakeEngine
from tools.gpu_stages.table import table

LIMIT = 540.0
"""Seconds of a stage."""

STAGES: dict[str, Callable[[Scale], Iterator[Results]]] = {
    "machine": kernels.machine,
    "correctness": kernels.correctness,
    "model": executor.model,
    "operations": kernels.operations,
    "quantised": quantised.quantised,
    "adapters": adapters.adapters,
    "weights": weights.weights,
    "decode": executor.decode,
    "prefill": executor.prefill,
    "launches": executor.launches,
    "step": executor.step,
    "idle": executor.idle,
    "tuning": tuning.tuning,
}
SERVED_STAGES: dict[str, Callable[[Scale, MakeEngine], Iterator[Results]]] = {
    "ready": serving.ready,
    "offline": serving.offline,
    "small_models": serving.small_models,
    "shared_prefix": serving.shared_prefix,
    "transformers": serving.against_transformers,
}
"""Those that start Tercet's processes."""


def run_stage(name: str, scale: Scale, make_engine: MakeEngine, out: Path) -> Results:
    """One stage's record, written to OUT as it grows."""
    start = time.perf_counter()
    record: Results = {
        "stage": name,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": f"python -m tools.gpu_check --stage {name}",
        "machine": describe_machine(),
        "ceilings": kernels.ceilings_of(scale),
        "seconds": 0.0,
        "complete": False,
        "results": {},
    }
    parts = STAGES[name](scale) if name in STAGES else SERVED_STAGES[name](scale, make_engine)
    for part in parts:
        record["results"] |= part
        record["seconds"] = time.perf_counter() - start
        write(record, out)
    record["complete"] = True
    write(record, out)
    return record


def write(record: Results, out: Path) -> Path:
    """Keep a record in a file of its own; a reader never sees half of one."""
    path = out / f"{device_name(record)}-{record['stage']}.json"
    out.mkdir(parents=True, exist_ok=True)
    fresh = path.with_suffix(".part")
    fresh.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    fresh.replace(path)
    return path


def device_name(record: Mapping[str, Any]) -> str:
    """The GPU of a record, as files are named."""
    name = record["machine"].get("gpu 0", record["machine"].get("gpu", "none")).split(",")[0]
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def read(out: Path) -> dict[str, dict[str, Results]]:
    """The records there are, by device and stage."""
    found: dict[str, dict[str, Results]] = {}
    for path in sorted(out.glob("*.json")):
        record = json.loads(path.read_text(encoding="utf-8"))
        found.setdefault(device_name(record), {})[record["stage"]] = record
    return found


def shows_equality(record: Results, backend: str, architecture: str) -> bool:
    """Whether a record of correctness shows what verified.json says of a backend."""
    results = record["results"]
    return (
        record["stage"] == "correctness"
        and bool(record["complete"])
        and results["wrong"] == []
        and results["architecture"] == architecture
        and results["checks"][f"grid {backend}"] == "ok"
    )


def main(arguments: list[str]) -> int:
    """Run the stages asked for, or all; 1 where one fails, 2 without a GPU."""
    names = [*STAGES, *SERVED_STAGES]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stage", nargs="+", choices=names, default=names)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    parser.add_argument("--table", action="store_true", help="print what the results in OUT say, and measure nothing")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.table:
        return _print_tables(options.out)
    if not torch.cuda.is_available():
        print("no GPU is here: nothing was measured", file=sys.stderr)
        return 2
    if options.inside:
        from tercet.frontend.engine import Engine

        record = run_stage(options.stage[0], FULL, Engine, options.out)
        print(json.dumps(record["results"]), flush=True)
        return 1 if record["results"].get("wrong") else 0
    return _each(options.stage, options.out)


def _print_tables(out: Path) -> int:
    found = read(out)
    for device, records in found.items():
        print(f"{device}\n\n{table(records)}\n")
    if not found:
        print("nothing was measured", file=sys.stderr)
    return 0 if found else 2


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
    _print_tables(out)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
