"""Staged check that the GPU path is correct, and how near it is to the hardware's limits.

python -m tools.gpu_check [--stage NAME ...] [--out benchmarks/results] [--bundle FILE] [--stop-when-wrong]
python -m tools.gpu_check --minutes 15 [--bundle FILE]
python -m tools.gpu_check --plan [15]
python -m tools.gpu_check --choices
python -m tools.gpu_check --table [--bundle FILE]
python -m tools.gpu_check --unbundle FILE [--out benchmarks/results]

Each stage runs in a process of its own for at most nine minutes and writes OUT/<device>-<stage>.json: its results, the
machine, the date, the command, and the bandwidth and matrix rate that were measured in the same minute. The file is
rewritten with every part of the results, so that a stage that is cut off keeps its partial results. The same holds for
a bundle, one file with the records of all stages of a run. Correctness comes first: if it fails, the records of later
stages and the table say so. With --minutes, the most wanted stages run first, in the order that --plan prints, and the
run ends in time; stages that a bundle has complete are left out, so that the next run goes on. A bundle is of one
commit and one machine. benchmarks/results/README.md has the requirements of the stages. Without a GPU the program
refuses to run.
"""

import argparse
import datetime
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import torch

from tercet.kernels.device import describe_machine
from tercet.kernels.triton.linear import choices
from tools.gpu_stages import (
    adapters,
    executor,
    kernels,
    mixtures,
    quantised,
    serving,
    speculation,
    torch_kernels,
    tuning,
    weights,
)
from tools.gpu_stages.records import Records, by_device, device_name, read, read_file, trouble_of, unbundle, write
from tools.gpu_stages.scale import FULL, Results, Scale
from tools.gpu_stages.schedule import MARGIN, next_turn, plan_text
from tools.gpu_stages.serving import MakeEngine
from tools.gpu_stages.sessions import run_apart
from tools.gpu_stages.table import table
from tools.gpu_stages.ways import choices_of

LIMIT = 540.0
"""Seconds per stage."""

CHOICES = Path(choices.__file__).with_name("choices.json")

Limited = tuple[str, float]
"""(stage, seconds after which it is ended)"""

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
    "mixtures": mixtures.time_mixtures,
    "torch_kernels": torch_kernels.time_kernels,
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
"""Stages that start Tercet's processes."""


def run_stage(name: str, scale: Scale, make_engine: MakeEngine, out: Path, bundle: Path | None = None) -> Results:
    """Return one stage's record, written as it grows. It includes the result of correctness on this device from OUT."""
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
    """Run the requested stages, or all; return 1 if one fails, 2 without a GPU."""
    options = _options(arguments)
    if options.unbundle:
        for path in unbundle(options.unbundle, options.out):
            print(path)
        return 0
    if options.choices:
        return write_choices(read(options.out), CHOICES)
    if options.plan:
        _show(plan_text(options.stage, options.plan))
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
    if options.minutes:
        chosen = in_time(_missing(options.stage, options.bundle), options.minutes)
    else:
        chosen = ((stage, LIMIT) for stage in options.stage)
    return run_stages(chosen, options.out, options.bundle, stop=options.stop_when_wrong)


def in_time(stages: Sequence[str], minutes: float, clock: Callable[[], float] = time.monotonic) -> Iterator[Limited]:
    """Yield the stages that fit into what is left of the minutes whenever one is taken, the most wanted first."""
    end, left = clock() + minutes * 60, set(stages)
    while turn := next_turn(left, end - clock()):
        left.remove(turn.stage)
        yield turn.stage, min(LIMIT, end - MARGIN - clock())


def _missing(stages: Sequence[str], bundle: Path | None) -> list[str]:
    """Return the stages without a complete record in the bundle."""
    known = {record["stage"] for record in (read_file(bundle) if bundle else []) if record["complete"]}
    return [stage for stage in stages if stage not in known]


def _options(arguments: list[str]) -> argparse.Namespace:
    names = [*STAGES, *SERVED_STAGES]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stage", nargs="+", choices=names, default=names)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"), help="folder of a file for each stage")
    parser.add_argument("--bundle", type=Path, help="keep the records of this run in one file, too")
    parser.add_argument("--stop-when-wrong", action="store_true", help="measure nothing after correctness that failed")
    parser.add_argument("--minutes", type=float, help="run the most wanted stages, and end in time")
    parser.add_argument(
        "--plan", type=float, nargs="?", const=15.0, metavar="MINUTES", help="print the order of the stages for a time"
    )
    parser.add_argument("--choices", action="store_true", help="write the table of kernels from the records of tuning")
    parser.add_argument("--table", action="store_true", help="print what OUT, or the bundle, says, and measure nothing")
    parser.add_argument("--unbundle", type=Path, metavar="FILE", help="write a bundle's records to OUT, and end")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def write_choices(found: Records, path: Path) -> int:
    """Put what the records of tuning say of their architectures into the table of kernels; return 2 without one."""
    tables = [choices_of(records["tuning"]["results"]) for records in found.values() if "ways" in _tuned(records)]
    if not tables:
        print("no record of tuning has the ways of 8-bit products", file=sys.stderr)
        return 2
    content = json.loads(path.read_text(encoding="utf-8"))
    for table_of_one in tables:
        content |= table_of_one
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    return 0


def _tuned(records: Mapping[str, Results]) -> Results:
    results: Results = records.get("tuning", {}).get("results", {})
    return results


def _show(text: str) -> None:
    """Print a text whose reader may close the pipe early, as `head` does."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the interpreter flushes again at exit


def _print_tables(found: Records) -> int:
    for device, records in found.items():
        _show(f"{device}\n\n{table(records)}\n")
    if not found:
        print("nothing was measured", file=sys.stderr)
    return 0 if found else 2


def run_stages(stages: Iterable[Limited], out: Path, bundle: Path | None, *, stop: bool) -> int:
    """Run each stage in a process of its own that ends with everything it started; return 1 if one fails.

    With `stop`, no stage runs after correctness has failed.
    """
    failed = []
    for stage, limit in stages:
        command = [sys.executable, "-m", "tools.gpu_check", "--inside", "--stage", stage, "--out", str(out)]
        code = run_apart([*command, "--bundle", str(bundle)] if bundle else command, limit)
        if code is None:
            print(f"{stage}: not done after {limit:.0f} s", file=sys.stderr)
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
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the processes it started end with it
    sys.exit(main(sys.argv[1:]))
