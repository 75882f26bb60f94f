"""Comparison of Tercet with other servers on this machine: the same load on each in turn, round after round.

python tools/bench_peers.py MODEL [...] --llama-server PATH [--vllm PYTHON] [--rounds 3]: see bench_peers.md.
"""

import argparse
import asyncio
import contextlib
import json
import os
import platform
import shlex
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import psutil

from tercet.frontend.cli.bench.client import Target
from tercet.frontend.cli.bench.load import run_workload
from tercet.frontend.cli.bench.workload import (
    DEFAULT_WORKLOADS,
    WORKLOADS,
    Request,
    Workload,
    make_requests,
    single_token_words,
)
from tercet.scheduler.gguf_models import resolve_any_model

OURS = "tercet"
OURS_INT8 = f"{OURS} int8"
LLAMA_SERVER = "llama-server"
_QUANTISED = ("int8", "q8_0")
_GGUF = ".gguf"
_CONTEXT_STEP = 256
PATIENCE = 300.0
"""Seconds within which a server must be ready."""


@dataclass(frozen=True)
class Peer:
    """Command that starts a server, with the placeholders {model}, {gguf} and {port}."""

    name: str
    command: str
    environment: dict[str, str] = field(default_factory=dict)

    def serves(self, model: Path) -> bool:
        """Return whether it reads this model: a GGUF file has one number format, which vLLM lacks."""
        return model.suffix != _GGUF or self.name in {OURS, LLAMA_SERVER}

    def arguments(self, model: Path, port: int) -> list[str]:
        """Return the command for a model on a port."""
        gguf = (
            str(model) if model.suffix == _GGUF else f"{model}.{'q8_0' if self.name.endswith('q8_0') else 'bf16'}.gguf"
        )
        return [part.format(model=model, gguf=gguf, port=port) for part in shlex.split(self.command)]


def peers_of(options: argparse.Namespace) -> list[Peer]:
    """Return Tercet, and the servers whose programs were named."""
    ours = f"{Path(sys.executable).parent / 'tercet'} serve {{model}} --port {{port}} --served-model-name m"
    ours += f" --threads {options.threads} --max-running-requests {options.slots} --scheduler.speculative-tokens 0"
    found = [Peer(OURS, ours)]
    length = _longest(options.workloads)
    if options.int8:
        found.append(Peer(OURS_INT8, f"{ours} --quantization int8"))
    if options.llama_server:
        command = (
            f"{options.llama_server} -m {{gguf}} -a m --port {{port}} -t {options.threads} -tb {options.threads} "
            f"-c {length * options.slots} -np {options.slots} -cb -fa on --no-webui"
        )
        found.append(Peer(LLAMA_SERVER, command))
        if options.int8:
            found.append(Peer(f"{LLAMA_SERVER} q8_0", command))
    if options.vllm:
        command = (
            f"{options.vllm} -m vllm.entrypoints.openai.api_server --model {{model}} --served-model-name m "
            f"--port {{port}} --dtype bfloat16 --max-model-len {length} --max-num-seqs {options.slots}"
        )
        cores = {"VLLM_CPU_OMP_THREADS_BIND": f"0-{options.threads - 1}", "VLLM_CPU_NUM_OF_RESERVED_CPU": "0"}
        found.append(Peer("vLLM", command, {"VLLM_CPU_KVCACHE_SPACE": "2", "HF_HUB_OFFLINE": "1", **cores}))
    return found


def _longest(workloads: Sequence[str]) -> int:
    """Return the tokens that the longest request of the workloads may take, in whole pages of 256."""
    chosen = (WORKLOADS[name] for name in workloads)
    tokens = max(each.shared_tokens + each.input_tokens + each.output_tokens for each in chosen)
    return (tokens // _CONTEXT_STEP + 2) * _CONTEXT_STEP


class StartError(Exception):
    """A peer that cannot be measured; the others can."""


class Server:
    """Running peer. Its whole process group ends with it."""

    def __init__(self, peer: Peer, model: Path, port: int, log: Path) -> None:
        self.url = f"http://127.0.0.1:{port}"
        started = time.monotonic()
        self._process = subprocess.Popen(
            peer.arguments(model, port),
            env={**os.environ, **peer.environment},
            stdout=log.open("w"),
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        while not self._ready():
            if self._process.poll() is not None or time.monotonic() - started > PATIENCE:
                self.stop()
                raise StartError(f"{peer.name} did not start: see {log}")
            time.sleep(0.05)
        self.startup = time.monotonic() - started

    def _ready(self) -> bool:
        with contextlib.suppress(OSError), urllib.request.urlopen(f"{self.url}/health", timeout=2) as response:  # noqa: S310 - our own address
            return bool(response.status == 200)
        return False

    def processes(self) -> list[psutil.Process]:
        """Return all processes of the server."""
        root = psutil.Process(self._process.pid)
        return [root, *root.children(recursive=True)]

    def cpu_seconds(self) -> float:
        """Return the processor seconds of all processes so far."""
        return seconds(self.processes())

    def megabytes(self) -> float:
        """Return the memory in MB; a shared page is divided among the processes that share it."""
        return sum(process.memory_full_info().pss for process in self.processes()) / 1e6

    def stop(self) -> None:
        """Terminate the server, and kill it if it does not end."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGTERM)
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()


@contextlib.contextmanager
def running(peer: Peer, model: Path, port: int, log: Path) -> Iterator[Server]:
    """Yield a peer that runs as long as the block."""
    server = Server(peer, model, port, log)
    try:
        yield server
    finally:
        server.stop()


def seconds(processes: list[psutil.Process]) -> float:
    """Return the processor seconds of the processes."""
    return sum(sum(process.cpu_times()[:2]) for process in processes)


def machine_seconds() -> float:
    """Return the processor seconds of the whole machine."""
    times = psutil.cpu_times()
    return float(times.user + times.nice + times.system + getattr(times, "steal", 0.0))


def put(server: Server, workload: Workload, requests: list[Request]) -> dict[str, Any]:
    """Return one measurement, with the cores that the server and other programs used meanwhile."""
    own = psutil.Process()
    before = time.monotonic(), machine_seconds(), server.cpu_seconds(), sum(own.cpu_times()[:2])
    figures = asyncio.run(run_workload(Target(url=server.url, model="m"), workload, requests))
    after = time.monotonic(), machine_seconds(), server.cpu_seconds(), sum(own.cpu_times()[:2])
    seconds, machine, served, asked = (late - early for early, late in zip(before, after, strict=True))
    cores = {"server_cores": served / seconds, "foreign_cores": (machine - served - asked) / seconds}
    return asdict(figures) | cores


def measure(options: argparse.Namespace, peers: list[Peer]) -> Iterator[dict[str, Any]]:
    """Yield rows: every workload, of every peer, on every model, in every round."""
    logs = Path(tempfile.mkdtemp(prefix="tercet-bench-"))
    for number in range(options.rounds):
        for model in options.models:
            words = single_token_words(resolve_any_model(str(model)))
            able = [peer for peer in peers if peer.serves(model)]
            for peer in able[number % len(able) :] + able[: number % len(able)]:  # another one is first in each round
                log = logs / f"{peer.name.replace(' ', '-')}-{model.name}-{number}.log"
                try:
                    with running(peer, model, options.port, log) as server:
                        row = {"peer": peer.name, "model": model.name, "round": number, "startup": server.startup}
                        yield from (row | figures for figures in loads(options, server, words))
                except StartError as error:
                    print(error)


def loads(options: argparse.Namespace, server: Server, words: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Yield the rows of every workload on a server, once it is warm."""
    warm = Workload(concurrency=2, requests=2, input_tokens=64, output_tokens=8)
    put(server, warm, make_requests(warm, words, time.time_ns()))
    for name in options.workloads:
        full = WORKLOADS[name]
        workload = replace(full, requests=max(full.concurrency, round(full.requests * options.scale)))
        requests = make_requests(workload, words, time.time_ns())
        yield {"workload": name} | put(server, workload, requests) | {"MB": server.megabytes()}


def table(rows: list[dict[str, Any]], peers: list[Peer], most_foreign: float) -> str:
    """Return medians in Markdown, without rows that failed or were disturbed.

    A row is disturbed if other programs took more than `most_foreign` cores.
    """
    cells: dict[tuple[str, str, str], list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        if row["foreign_cores"] <= most_foreign and row["ttft_ms"]:
            cells[row["model"], row["workload"], row["peer"]].append(row)
    names = [peer.name for peer in peers]
    rivals = {OURS: [name for name in names if not name.startswith(OURS) and not name.endswith(_QUANTISED)]}
    if OURS_INT8 in names:
        rivals[OURS_INT8] = [name for name in names if name.endswith(_QUANTISED) and name != OURS_INT8]
    ratios = " | ".join(f"{name} / best" for name in rivals)
    lines = [f"| model, load | {' | '.join(names)} | {ratios} |", "|---" * (len(names) + len(rivals) + 1) + "|"]
    for model, load in dict.fromkeys((row["model"], row["workload"]) for row in rows):
        found = {name: cells[model, load, name] for name in names if cells[model, load, name]}
        speed = {name: statistics.median(one["output_tokens_per_second"] for one in of) for name, of in found.items()}
        texts = [_cell(found[name], speed[name]) if name in found else "-" for name in names]
        texts += [_ratio(speed, name, against) for name, against in rivals.items()]
        lines.append(f"| {model}, {load} | {' | '.join(texts)} |")
    left_out = len(rows) - sum(map(len, cells.values()))
    busiest = max((row["foreign_cores"] for row in rows), default=0.0)
    return "\n".join([*lines, "", f"{left_out} of {len(rows)} left out; strangers took {busiest:.2f} cores at most."])


def _ratio(speed: dict[str, float], name: str, rivals: list[str]) -> str:
    """Return the speed as a multiple of the best rival's."""
    others = [speed[rival] for rival in rivals if rival in speed]
    return f"{speed[name] / max(others):.2f}" if name in speed and others else "-"


def _cell(rows: list[dict[str, Any]], speed: float) -> str:
    first, each = (statistics.median(row[key].get("p50", 0.0) for row in rows) for key in ("ttft_ms", "tpot_ms"))
    last = statistics.median(row["ttft_ms"].get("p99", 0.0) for row in rows)
    wrong = sum(row["failed"] + row["short"] for row in rows)
    return f"{speed:.1f} tok/s, {first:.0f} (p99 {last:.0f}) + {each:.1f} ms" + (f", {wrong} wrong" if wrong else "")


def machine() -> str:
    """Return one line about this machine."""
    name = platform.processor() or platform.machine()
    with contextlib.suppress(OSError, StopIteration):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        name = next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return f"{name}, {os.cpu_count()} cores, {psutil.virtual_memory().total / 2**30:.0f} GiB"


def main(arguments: list[str]) -> int:
    """Measure, append a JSON line per row to a file, and print the table of all its rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", type=Path, nargs="+", help="directories, with NAME.bf16.gguf beside, or GGUF files")
    parser.add_argument("--llama-server", type=Path)
    parser.add_argument("--vllm", type=Path, help="a Python that has vLLM")
    parser.add_argument("--int8", action="store_true", help="also 8-bit weights, beside NAME.q8_0.gguf")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--scale", type=float, default=1.0, help="share of each workload's requests")
    parser.add_argument("--workloads", nargs="+", default=list(DEFAULT_WORKLOADS), choices=list(WORKLOADS))
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="of each server's model")
    parser.add_argument("--slots", type=int, default=32, help="requests that each server runs at a time")
    parser.add_argument("--most-foreign", type=float, default=0.15, help="cores that strangers may take")
    parser.add_argument("--port", type=int, default=8110)
    parser.add_argument("--out", type=Path, default=Path("peers.jsonl"), help="rows of earlier runs count, too")
    options = parser.parse_args(arguments)
    options.models = [model.resolve() for model in options.models]
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # through `running`, so that no peer is left to the next run
    peers = peers_of(options)
    rows = [json.loads(line) for line in options.out.read_text().splitlines()] if options.out.exists() else []
    with options.out.open("a", encoding="utf-8") as out:
        for row in measure(options, peers):
            rows.append(row)
            out.write(json.dumps(row) + "\n")
            out.flush()
            speed, strangers = row["output_tokens_per_second"], row["foreign_cores"]
            print(f"{row['model']} {row['workload']} {row['peer']}: {speed:.1f} tok/s, strangers {strangers:.2f} cores")
    print(f"\n{time.strftime('%Y-%m-%d')}, {machine()}; tokens a second, then the medians of")
    print("the time to the first token (and its p99) and of the time for each after it.\n")
    print(table(rows, peers, options.most_foreign))
    for peer in peers:
        starts = [row["startup"] for row in rows if row["peer"] == peer.name]
        memory = [row["MB"] for row in rows if row["peer"] == peer.name]
        if starts:
            print(f"{peer.name}: ready in {statistics.median(starts):.1f} s, {max(memory):.0f} MB at most")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
