"""Cost of an idle server: processor time, wake-ups and memory of each part, and its start-up time.

python tools/idle.py [MODEL] [--seconds 20] [--json FILE] [--threads] [SERVE OPTION...]: starts `tercet serve`, requests
one completion, lets the server rest, and reads /proc at both ends of an interval. Linux only.
"""

import argparse
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

PATIENCE = 120.0
"""Seconds for the start, and for the end."""
_ROLES = ("scheduler", "detokenizer", "frontend")


@dataclass
class Use:
    """Use of one thread since its start."""

    nanoseconds: int
    wakes: int


@dataclass
class Part:
    """Process at one moment; its own child processes count as parts, too."""

    name: str
    pss: int
    """Bytes; a shared page is divided among the processes that share it."""
    threads: dict[str, Use] = field(default_factory=dict)
    """Use by name and thread id."""


@dataclass
class Cost:
    """Share of one core, and wake-ups, over an interval."""

    cpu_percent: float
    wakes_per_second: float


@dataclass
class PartCost(Cost):
    """Cost of a part, with its memory at the end."""

    part: str
    pss_mb: float
    threads: dict[str, Cost]


@dataclass
class Server:
    """Running server: its URL, and the seconds of its start."""

    pid: int
    url: str
    startup: float


@contextlib.contextmanager
def serving(model: str, options: list[str]) -> Iterator[Server]:
    """Yield a server that runs as long as the block."""
    command = [str(Path(sys.executable).with_name("tercet")), "serve", model, "--port", "0", *options]
    with tempfile.TemporaryDirectory(prefix="tercet-idle-") as state:
        began = time.monotonic()
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, text=True, env={**os.environ, "XDG_STATE_HOME": state}
        )
        try:
            assert process.stdout is not None
            url = next((found[1] for line in process.stdout if (found := re.match(r"ready at (\S+)", line))), "")
            if not url:
                raise RuntimeError("the server did not start")
            yield Server(process.pid, url, time.monotonic() - began)
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(PATIENCE)


def ask(url: str) -> None:
    """Request one completion, so that data loaded by the first request is in memory."""
    with urllib.request.urlopen(f"{url}/v1/models") as response:  # noqa: S310 - our own address
        model = json.load(response)["data"][0]["id"]
    body = json.dumps({"model": model, "prompt": "Once upon a time", "max_tokens": 16}).encode()
    request = urllib.request.Request(f"{url}/v1/completions", body, {"content-type": "application/json"})  # noqa: S310
    with urllib.request.urlopen(request, timeout=PATIENCE) as response:  # noqa: S310
        response.read()


def look(root: int) -> dict[int, Part]:
    """Return every process of a server in its current state."""
    return {pid: _part(pid, root) for pid in _family(root)}


def _family(pid: int) -> list[int]:
    lists = [path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/children")]
    return [pid, *(each for text in lists for child in text.split() for each in _family(int(child)))]


def _part(pid: int, root: int) -> Part:
    proc = Path("/proc", str(pid))
    words = proc.joinpath("cmdline").read_bytes().decode().split("\0")
    role = next((role for role in _ROLES if f"tercet.{role}" in words), "")
    name = "supervisor" if pid == root else words[words.index("--peer") + 1] if role else f"helper {pid}"
    part = Part(name, 1024 * _number("Pss", proc / "smaps_rollup"))
    for task in proc.joinpath("task").iterdir():
        with contextlib.suppress(FileNotFoundError):  # a thread that has just ended
            nanoseconds = int(task.joinpath("schedstat").read_text().split()[0])
            wakes = _number("voluntary_ctxt_switches", task / "status")
            comm = task.joinpath("comm").read_text().strip()
            part.threads[f"{comm} {task.name}"] = Use(nanoseconds, wakes)
    return part


def _number(name: str, path: Path) -> int:
    found = re.search(rf"^{name}:\s+(\d+)", path.read_text(), re.MULTILINE)
    if found is None:
        raise ValueError(f"{path} says nothing of {name}")
    return int(found[1])


def compare(before: dict[int, Part], after: dict[int, Part], seconds: float) -> list[PartCost]:
    """Return the cost of each part in between; new parts count from their start."""
    costs = []
    for pid, part in after.items():
        earlier = before[pid].threads if pid in before else {}
        threads = {}
        for name, use in part.threads.items():
            then = earlier.get(name, Use(0, 0))
            threads[name] = Cost(
                (use.nanoseconds - then.nanoseconds) / seconds / 1e7, (use.wakes - then.wakes) / seconds
            )
        costs.append(_together(part.name, part.pss / 1e6, threads))
    return costs


def _together(name: str, megabytes: float, costs: Mapping[str, Cost]) -> PartCost:
    cpu, wakes = (
        sum(each) for each in zip(*((c.cpu_percent, c.wakes_per_second) for c in costs.values()), strict=True)
    )
    return PartCost(cpu, wakes, name, megabytes, dict(costs))


def main(arguments: list[str]) -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="embedded")
    parser.add_argument("--seconds", type=float, default=20.0, help="how long to look")
    parser.add_argument("--settle", type=float, default=3.0, help="how long to let it rest before")
    parser.add_argument("--json", type=Path, help="write the figures there, too")
    parser.add_argument("--threads", action="store_true", help="a line for each thread that did anything")
    options, more = parser.parse_known_args(arguments)
    with serving(options.model, more) as server:
        ask(server.url)
        time.sleep(options.settle)
        start, before = time.monotonic(), look(server.pid)
        time.sleep(options.seconds)
        seconds, after = time.monotonic() - start, look(server.pid)
    parts = compare(before, after, seconds)
    total = _together("together", sum(part.pss_mb for part in parts), {part.part: part for part in parts})
    print(f"{options.model}: ready in {server.startup:.2f} s")
    line = "{:14} {:6.2f}% of a core {:7.1f} wakes/s {:8.1f} MB"
    for each in [*parts, total]:
        print(line.format(each.part, each.cpu_percent, each.wakes_per_second, each.pss_mb))
        for name, cost in each.threads.items() if options.threads and each is not total else ():
            if cost.wakes_per_second > 0:
                print(f"    {name:24} {cost.cpu_percent:6.2f}% {cost.wakes_per_second:7.1f} wakes/s")
    if options.json:
        report = {"model": options.model, "startup_s": server.startup, "seconds": seconds, **asdict(total)}
        options.json.write_text(json.dumps(report, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
