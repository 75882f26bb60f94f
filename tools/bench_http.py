"""Cost of HTTP: processor time of each server's listening processes per streamed token.

python -m tools.bench_http MODEL_DIR --vllm PYTHON [--rounds 3]: the smaller the model, the more tokens per second there
are. 64 concurrent streams of 400 tokens; the engine's own processes are not counted.
"""

import argparse
import asyncio
import os
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path

import psutil

from tercet.frontend.cli.bench.client import Target
from tercet.frontend.cli.bench.load import run_workload
from tercet.frontend.cli.bench.workload import DEFAULT_WORKLOADS, Request, Workload, make_requests, single_token_words
from tools.bench_peers import Server, machine, peers_of, running, seconds

STREAMS = Workload(concurrency=64, requests=64, input_tokens=16, output_tokens=400)


def listening(server: Server, port: int) -> list[psutil.Process]:
    """Return the server's processes that hold the port."""

    def holds(process: psutil.Process) -> bool:
        sockets = process.net_connections(kind="tcp")
        return any(each.status == psutil.CONN_LISTEN and each.laddr.port == port for each in sockets)

    return [process for process in server.processes() if holds(process)]


def measure(server: Server, port: int, requests: list[Request]) -> tuple[float, float, int]:
    """Return (tokens per second of one core, tokens per second, answers that failed or were short)."""
    front = listening(server, port)
    before, began = seconds(front), time.monotonic()
    figures = asyncio.run(run_workload(Target(url=server.url, model="m"), STREAMS, requests))
    tokens = STREAMS.requests * STREAMS.output_tokens
    took, spent = time.monotonic() - began, seconds(front) - before
    return tokens / spent, tokens / took, figures.failed + figures.short


def main(arguments: list[str]) -> int:
    """Measure the servers alternately, and print medians."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--vllm", type=Path, help="a Python that has vLLM")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--port", type=int, default=8110)
    parser.set_defaults(threads=os.cpu_count(), int8=False, llama_server=None, slots=64, workloads=DEFAULT_WORKLOADS)
    options = parser.parse_args(arguments)
    found = defaultdict(list)
    logs = Path(tempfile.mkdtemp(prefix="tercet-bench-"))
    for number in range(options.rounds):
        for peer in peers_of(options):
            with running(peer, options.model.resolve(), options.port, logs / f"{peer.name}-{number}.log") as server:
                for turn in range(2):  # the first warms up
                    requests = make_requests(STREAMS, single_token_words(options.model), time.time_ns())
                    result = measure(server, options.port, requests)
                    if turn:
                        found[peer.name].append(result)
                        print(
                            f"{peer.name}: {result[0]:,.0f} tokens/s of a core, {result[1]:,.0f} tokens/s", flush=True
                        )
    print(f"\n{time.strftime('%Y-%m-%d')}, {machine()}, medians of {options.rounds}")
    for name, results in found.items():
        core, wall = (statistics.median(each[index] for each in results) for index in (0, 1))
        wrong = sum(each[2] for each in results)
        print(f"{name:14} {core:10,.0f} tokens/s of a core {wall:10,.0f} tokens/s {wrong} wrong")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
