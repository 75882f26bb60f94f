"""Finds out, in stages, whether the GPU path is right and how near it is to the hardware's limits.

python -m tools.gpu_check [--stage NAME ...] [--out benchmarks/results] [--bundle FILE] [--stop-when-wrong]
python -m tools.gpu_check --table [--bundle FILE]
python -m tools.gpu_check --unbundle FILE [--out benchmarks/results]

Each stage runs in a process of its own for at most nine minutes and writes OUT/<device>-<stage>.json: its results, the
machine, the date, the command, and beside them the bandwidth and the rate that were measured in the same minute. It is
written again with every part of the results, so that a stage that is cut off keeps what it had. So is a bundle, one
file that holds the records of all stages of a run.
Correctness comes first: where it fails, the records of later stages say so and what is wrong, and so does the table.
In which order stages are best run where time is short, and what each needs, says benchmarks/results/README.md.
Without a GPU it refuses.
"""

import argparse
import datetime
import json
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from tercet.kernels.device import describe_machine
from tools.gpu_stages import adapters, executor, kernels, quantised, serving, speculation, tuning, weights
from tools.gpu_stages.records import Records, by_device, device_name, read, read_file, trouble_of, unbundle, write
from tools.gpu_stages.scale import FULL, Results, Scale
from tools.gpu_stages.serving import MakeEngine
from tools.gpu_stages.sessions import run_apart
from tools.gpu_stages.table import table

LIMIT = 540.0
"""Seconds of a stage."""

STAGES: dict[str, Callable[[Scale], Iterator[Results]]] = {
    "machine": kernels.machine,
    "correctness": kernels.correctness,
    "model": executor.model,
    "operations": kernels.operations,
    "quantised": quantised.compare,
    "adapters": adapters.compare,
    "weights": weights.weights,
    "decode": executor.decode,
    "rotation": executor.rotation,
    "quantised_times": quantised.time_forms,
    "adapter_times": adapters.time_adapters,
    "speculation_times": speculation.time_steps,
    "speculation": speculation.compare,
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


def run_stage(name: str, scale: Scale, make_engine: MakeEngine, out: Path, bundle: Path | None = None) -> Results:
    """One stage's record, written as it grows. What OUT knows of correctness on this device is part of it."""
    start = time.perf_counter()
    record: Results = {
        "stage": name,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": f"python -m tools.gpu_check --stage {name}",
        "machine": describe_machine(),
        "ceilings": {},
        "seconds": 0.0,
        "complete": False,
        "results": {},
    }
    if name != "correctness":
        known = read(out).get(device_name(record), {}).get("correctness")
        record["correctness"] = known and {"date": known["date"], "trouble": trouble_of(known)}
    write(record, out, bundle)
    record["ceilings"] = kernels.ceilings_of(scale)
    parts = STAGES[name](scale) if name in STAGES else SERVED_STAGES[name](scale, make_engine)
    for part in parts:
        record["results"] |= part
        record["seconds"] = time.perf_counter() - start
        write(record, out, bundle)
    record["complete"] = True
    write(record, out, bundle)
    return record


def main(arguments: list[str]) -> int:
    """Run the stages asked for, or all; 1 where one fails, 2 without a GPU."""
    options = _options(arguments)
    if options.unbundle:
        for path in unbundle(options.unbundle, options.out):
            print(path)
        return 0
    if options.table:
        return _print_tables(by_device(read_file(options.bundle)) if options.bundle else read(options.out))
    if not torch.cuda.is_available():
        print("no GPU is here: nothing was measured", file=sys.stderr)
        return 2
    if options.inside:
        from tercet.frontend.engine import Engine

        record = run_stage(options.stage[0], FULL, Engine, options.out, options.bundle)
        print(json.dumps(record["results"]), flush=True)
        return 1 if record["results"].get("wrong") else 0
    return run_stages(options.stage, options.out, options.bundle, stop=options.stop_when_wrong)


def _options(arguments: list[str]) -> argparse.Namespace:
    names = [*STAGES, *SERVED_STAGES]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stage", nargs="+", choices=names, default=names)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"), help="folder of a file for each stage")
    parser.add_argument("--bundle", type=Path, help="keep the records of this run in one file, too")
    parser.add_argument("--stop-when-wrong", action="store_true", help="measure nothing after correctness that failed")
    parser.add_argument("--table", action="store_true", help="print what OUT, or the bundle, says, and measure nothing")
    parser.add_argument("--unbundle", type=Path, metavar="FILE", help="write a bundle's records to OUT, and end")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def _print_tables(found: Records) -> int:
    for device, records in found.items():
        print(f"{device}\n\n{table(records)}\n")
    if not found:
        print("nothing was measured", file=sys.stderr)
    return 0 if found else 2


def run_stages(stages: list[str], out: Path, bundle: Path | None, *, stop: bool) -> int:
    """Each in a process of its own, and what started there ends with it; 1 where one fails.

    None after correctness, if that fails and they are to stop then.
    """
    failed = []
    for stage in stages:
        command = [sys.executable, "-m", "tools.gpu_check", "--inside", "--stage", stage, "--out", str(out)]
        code = run_apart([*command, "--bundle", str(bundle)] if bundle else command, LIMIT)
        if code is None:
            print(f"{stage}: not done after {LIMIT:.0f} s", file=sys.stderr)
        if code != 0:
            failed.append(stage)
        if code != 0 and stage == "correctness":
            end = "the rest is not measured" if stop else "the records of what follows say so"
            print(f"{stage} failed: {end}", file=sys.stderr)
            if stop:
                break
    _print_tables(by_device(read_file(bundle)) if bundle else read(out))
    return 1 if failed else 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # what it started ends with it
    sys.exit(main(sys.argv[1:]))
