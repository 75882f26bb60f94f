"""`tercet bench serve`: options in, a table or JSON out."""

import asyncio
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Annotated

from cyclopts import App, Parameter

from tercet.frontend.cli.bench.client import Target
from tercet.frontend.cli.bench.load import Figures, Goal, run_workload
from tercet.frontend.cli.bench.workload import DEFAULT_WORKLOADS, WORKLOADS, Workload, make_requests, single_token_words
from tercet.frontend.cli.chat import ChatError, Server

app = App(name="bench", help="Measure a running server.", result_action="return_value")


@app.command
def serve(
    workloads: Annotated[tuple[str, ...], Parameter(help="W1 to W6; by default W1 to W4.")] = (),
    *,
    url: Annotated[str, Parameter(help="Address of the server.")] = "http://127.0.0.1:30000",
    model: Annotated[str | None, Parameter(help="Name of the model; by default the first of the server.")] = None,
    tokenizer: Annotated[Path | None, Parameter(help="The model's directory, for prompts of exact length.")] = None,
    api_key: Annotated[str | None, Parameter(help="The server's key.", env_var="TERCET_API_KEY")] = None,
    concurrency: Annotated[int | None, Parameter(help="Requests in flight at the same time.")] = None,
    requests: Annotated[int | None, Parameter(help="Number of requests.")] = None,
    input_tokens: Annotated[
        int | None, Parameter(help="Tokens of each prompt, beside the shared ones; in W6 the most.")
    ] = None,
    output_tokens: Annotated[int | None, Parameter(help="Tokens of each answer; in W6 the most.")] = None,
    shared_tokens: Annotated[int | None, Parameter(help="Tokens of the common beginning of all prompts.")] = None,
    rate: Annotated[float | None, Parameter(help="Requests a second, at random times; without --concurrency.")] = None,
    good_ttft: Annotated[float | None, Parameter(help="Most milliseconds to a good request's first token.")] = None,
    good_tpot: Annotated[float | None, Parameter(help="Most milliseconds per token of a good request.")] = None,
    seed: Annotated[int | None, Parameter(help="Seed of the prompts; by default another in every run.")] = None,
    json: Annotated[bool, Parameter(help="Print a JSON object for each workload.", negative="")] = False,
) -> int:
    """Measure time to first token, time per output token, gaps between pieces, throughput and good requests a second.

    W1 has one request at a time, with 128 tokens in and 128 out. W2 has 8 at a time. W3 has 32 at a time, with 64 out.
    W4 has 8 at a time that begin with the same 1024 tokens, with 32 tokens of their own and 32 out.
    W5 has 4 at a time, with 4096 tokens in and 64 out. W6 has 16 at a time, with 16 to 512 in and 8 to 256 out.
    """
    given = {
        "concurrency": concurrency,
        "requests": requests,
        "input_tokens": input_tokens,
        "output_tokens": output_tokens,
        "shared_tokens": shared_tokens,
    }
    changes = {name: value for name, value in given.items() if value is not None}
    good = Goal(
        first_token=None if good_ttft is None else good_ttft / 1e3,
        per_token=None if good_tpot is None else good_tpot / 1e3,
    )
    try:
        chosen = {name: replace(_workload(name), **changes) for name in workloads or DEFAULT_WORKLOADS}
        target = Target(url=url, model=model or Server(url, api_key).first_model(), api_key=api_key)
        words = single_token_words(tokenizer)
        if rate is not None and rate <= 0:
            raise ValueError("--rate must be above 0")
    except (ChatError, ValueError) as error:
        print(f"tercet: error: {error}", file=sys.stderr)  # noqa: T201
        return 2
    failed = 0
    for number, (name, workload) in enumerate(chosen.items()):
        load = make_requests(workload, words, (time.time_ns() if seed is None else seed) + number)
        result = asyncio.run(run_workload(target, workload, load, goal=good, rate=rate))
        print(result.to_json(name) if json else _describe(name, workload, result), flush=True)  # noqa: T201
        failed += result.failed
    return min(failed, 1)


def _workload(name: str) -> Workload:
    if name not in WORKLOADS:
        raise ValueError(f"{name} is not one of {', '.join(WORKLOADS)}")
    return WORKLOADS[name]


def _describe(name: str, workload: Workload, result: Figures) -> str:
    shared = f"{workload.shared_tokens} shared + " if workload.shared_tokens else ""
    inputs = _range(workload.least_input_tokens, workload.input_tokens)
    outputs = _range(workload.least_output_tokens, workload.output_tokens)
    lines = [
        f"{name}: {workload.requests} requests, {workload.concurrency} at a time, "
        f"{shared}{inputs} tokens in, {outputs} out",
        f"  {result.output_tokens_per_second:.1f} output tokens/s, {result.requests_per_second:.2f} requests/s, "
        f"{result.good_requests_per_second:.2f} good",
    ]
    spreads = {"first token": result.ttft_ms, "per token": result.tpot_ms, "between pieces": result.itl_ms}
    for what, spread in spreads.items():
        values = "  ".join(f"{percentile} {value:8.1f}" for percentile, value in spread.items())
        lines.append(f"  {what:15} {values or 'none'} ms")
    if result.failed:
        lines.append(f"  {result.failed} failed: {result.first_error}")
    if result.short:
        lines.append(f"  {result.short} answers were not {outputs} tokens long")
    return "\n".join(lines)


def _range(least: int | None, most: int) -> str:
    return str(most) if least is None else f"{least} to {most}"
