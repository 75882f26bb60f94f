"""Performance of the executor alone: steps of the large model, without sockets."""

import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import torch

from tercet.kernels.attention.select import BACKENDS, attention_backend, backend_names
from tercet.kernels.attention.triton import TritonAttention
from tercet.kernels.errors import UnavailableBackendError
from tools.gpu_stages.kernels import ceilings_of
from tools.gpu_stages.scale import Results, Scale, Shape, model_directory
from tools.gpu_stages.traces import idle_share, traced
from tools.gpu_stages.worker import Decoding, Offline, make_worker, time_model, wait

SETTLING = 40
"""Steps after which every graph is recorded, one per step."""


def model(scale: Scale) -> Iterator[Results]:
    """Yield how many greedy tokens of a shallow model equal those of plain torch attention, before rounding differs."""
    shape, prompt, steps = replace(scale.large, layers=2), min(scale.context, 256), min(scale.decodes, 64)
    said: dict[str, list[int]] = {}
    with model_directory(shape, scale.context * 2) as directory:
        for name in ("torch_native", *_device_backends(scale.device)):
            offline = Offline(directory, scale, slots=1, prompt=prompt, decodes=steps, attention=name)
            offline.prefill(0, prompt)
            said[name] = [tokens[0] for tokens in offline.decode(1, steps)[1]]
            pairs = zip(said[name], said["torch_native"], strict=True)
            alike = next((at for at, (mine, plain) in enumerate(pairs) if mine != plain), steps)
            yield {name: {"tokens": steps, "alike": alike}}


def _device_backends(device: torch.device) -> list[str]:
    """Return every backend of the device except plain torch."""
    found = []
    for name in backend_names():
        try:
            attention_backend(name, device)
        except UnavailableBackendError:
            continue
        found.append(name)
    return [name for name in found if name != "torch_native"]


def decode(scale: Scale) -> Iterator[Results]:
    """Yield milliseconds per token of the large model, with the time that reading its bytes takes.

    First with page tables as wide as the decoded context, then as wide as those of a server with default options.
    """
    copy = ceilings_of(scale)["copy_gb_per_s"] * 1e9
    for name, found in _decoded(scale, copy, scale.batches, "auto"):
        yield {name: found}
    wide: Results = {"context_length": scale.served_context}
    for name, found in _decoded(scale, copy, scale.batches, "auto", scale.served_context):
        wide[name] = found
        yield {"wide tables": wide}


def rotation(scale: Scale) -> Iterator[Results]:
    """Yield `decode` of the fewest and the most choices with Triton's attention, which rotates and stores new keys.

    Then with a separate kernel for that.
    """
    copy = ceilings_of(scale)["copy_gb_per_s"] * 1e9
    few = (min(scale.batches), max(scale.batches))
    yield {"one kernel": dict(_decoded(scale, copy, few, "triton"))}
    with _rotation_apart():
        yield {"two kernels": dict(_decoded(scale, copy, few, "triton"))}


def _decoded(
    scale: Scale, copy: float, batches: Sequence[int], attention: str, context: int = 0
) -> Iterator[tuple[str, dict[str, float]]]:
    """Yield decodes with a possible `context` above the decoded one. Memory bounds the tokens, not the context."""
    shape, size = scale.large, scale.dtype.itemsize
    decodes = scale.decodes + SETTLING
    with model_directory(shape, max(context, scale.context + decodes + 64)) as directory:
        slots = max(batches)
        offline = Offline(
            directory,
            scale,
            slots=slots,
            prompt=scale.context,
            decodes=decodes,
            context=context,
            attention=attention,
        )
        for slot in range(slots):
            offline.prefill(slot, scale.context)
        read = shape.weights * size, shape.cached * size
        for batch in batches:
            yield f"batch {batch}", decoded(offline, scale, batch, copy, weights=read[0], cached=read[1])
        offline.worker.close()


class _Apart:
    """`TritonAttention` without `attend_new`: decodes rotate and store new keys separately, as prefills do."""

    capturable = True

    def __init__(self) -> None:
        whole = TritonAttention()
        self.plan, self.attend = whole.plan, whole.attend


@contextmanager
def _rotation_apart() -> Iterator[None]:
    """Let workers created inside use that for Triton's attention."""
    [triton] = [backend for backend in BACKENDS if backend.name == "triton"]
    before, triton.attention = triton.attention, f"{__name__}:{_Apart.__name__}"
    try:
        yield
    finally:
        triton.attention = before


def decoded(
    offline: Offline, scale: Scale, batch: int, copy: float, *, weights: float, cached: float
) -> dict[str, float]:
    """Return milliseconds per token of slots that hold `scale.context` tokens, with the time to read the bytes.

    Each step reads `weights` bytes, and `cached` for every token, at `copy` bytes per second.
    """
    offline.rewind(scale.context)
    offline.decode(batch, SETTLING)
    before = sum(offline.lengths[:batch])
    steps, _ = offline.decode(batch, scale.decodes)
    tokens = (before + sum(offline.lengths[:batch])) / 2
    limit, median = (weights + tokens * cached) / copy, statistics.median(steps)
    return {"ms_per_token": median * 1e3, "limit_ms": limit * 1e3, "share_of_limit": limit / median}


def prefill(scale: Scale) -> Iterator[Results]:
    """Yield tokens per second of long prompts, with the limit of the machine's matrix rate."""
    rate = ceilings_of(scale)["bf16_tflop_per_s"] * 1e12
    with model_directory(scale.large, scale.prompt * 2) as directory:
        offline = Offline(directory, scale, slots=1, prompt=scale.prompt, decodes=0)
        speed = 0.0
        for repeats in range(1, 5):
            speed = max(speed, scale.prompt / offline.prefill(0, scale.prompt))
            share = speed * 2 * scale.large.weights / rate
            yield {"tokens_per_s": speed, "share_of_matmul": share, "repeats": repeats}


def launches(scale: Scale) -> Iterator[Results]:
    """Yield the time that Python takes to launch a prefill, with the time that the device takes to compute it.

    Recording parts of a prefill as graphs would pay only if the first is longer.
    """
    longest = max(scale.launched)
    with model_directory(scale.large, longest * 2) as directory:
        offline = Offline(directory, scale, slots=1, prompt=longest, decodes=0)
        timed = time_model(offline.worker)
        for tokens in scale.launched:
            offline.prefill(0, tokens)  # compiles the kernels for this length
            launch, device = [], []
            for _ in range(5):
                plan = offline.prefill_plan(0, tokens)
                wait()
                timed.seconds, start = 0.0, time.perf_counter()
                offline.worker.submit(plan).result()
                wait()
                device.append(time.perf_counter() - start)
                launch.append(timed.seconds)
            ratio = statistics.median(launch) / statistics.median(device)
            yield {
                f"{tokens} tokens": {
                    "launch_ms": statistics.median(launch) * 1e3,
                    "step_ms": statistics.median(device) * 1e3,
                    "launch_share": ratio,
                    "graphs_would_pay": ratio > 0.9,
                }
            }


def step(scale: Scale) -> Iterator[Results]:
    """Yield milliseconds of Python in a decode step outside the model: planning, tensors, sampling, results."""
    turns = scale.traced
    for batch in reversed(scale.batches):
        context = scale.context + SETTLING + turns + 64
        with model_directory(_shallow(scale.large), context) as directory:
            worker = make_worker(directory, scale, slots=batch, context=context, step=8192)
            timed = time_model(worker)
            decoding = Decoding(worker, batch, scale.context, SETTLING + turns + 32)
            for _ in range(SETTLING):
                decoding.timed(timed)
            found = [decoding.timed(timed) for _ in range(turns)]
        parts = ("plan", "submit", "finish", "outside")
        medians = {f"{part}_ms": statistics.median(getattr(turn, part) for turn in found) * 1e3 for part in parts}
        yield {f"batch {batch}": medians}


def idle(scale: Scale) -> Iterator[Results]:
    """Yield the share of a decode run, overlapped as in the loop, in which the device is idle."""
    most = max(scale.batches)
    runs = [(f"batch {batch}", scale.large, batch) for batch in reversed(scale.batches)]
    for name, shape, batch in [*runs, *((name, shape, most) for name, shape in scale.others.items())]:
        context = scale.context + SETTLING + scale.traced + 64
        with model_directory(shape, context) as directory:
            worker = make_worker(directory, scale, slots=batch, context=context, step=8192)
            decoding = Decoding(worker, batch, scale.context, SETTLING + scale.traced + 32)
            decoding.overlapped(SETTLING)
            work = traced(partial(decoding.overlapped, scale.traced), scale.device)
        yield {name: {"idle_share": idle_share(work), "pieces": len(work), "steps": scale.traced}}
        worker.close()
        del decoding, worker, work


def _shallow(shape: Shape) -> Shape:
    """Return the shape with few layers, which do not change the cost of Python outside the model."""
    return replace(shape, layers=2)
