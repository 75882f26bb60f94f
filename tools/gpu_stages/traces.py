"""Idle time of a device in traces of torch.profiler."""

import json
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path

import torch

_GPU_WORK = {"kernel", "gpu_memcpy", "gpu_memset"}
_CPU_WORK = {"cpu_op"}

Interval = tuple[float, float]
"""(begin, end) in microseconds"""


def idle_share(work: Iterable[Interval]) -> float:
    """Return the idle share of the time between the first beginning and the last end."""
    ordered = sorted(work)
    if not ordered:
        raise ValueError("nothing ran")
    first, busy = ordered[0][0], 0.0
    covered = first
    for begin, end in ordered:
        if end > covered:
            busy += end - max(begin, covered)
            covered = end
    return 1 - busy / (covered - first) if covered > first else 0.0


def traced(run: Callable[[], object], device: torch.device) -> list[Interval]:
    """Return the device's intervals while `run` ran."""
    gpu = device.type == "cuda"
    activity = torch.profiler.ProfilerActivity.CUDA if gpu else torch.profiler.ProfilerActivity.CPU
    with torch.profiler.profile(activities=[activity], acc_events=True) as profile:
        run()
        if gpu:
            torch.cuda.synchronize(device)
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory, "trace.json")
        profile.export_chrome_trace(str(path))
        return intervals(path, _GPU_WORK if gpu else _CPU_WORK)


def intervals(trace: Path, categories: set[str]) -> list[Interval]:
    """Return the events of some categories in an exported trace."""
    events = json.loads(trace.read_text(encoding="utf-8"))["traceEvents"]
    chosen = [event for event in events if event.get("cat") in categories and event.get("ph") == "X"]
    return [(float(event["ts"]), float(event["ts"]) + float(event["dur"])) for event in chosen]
