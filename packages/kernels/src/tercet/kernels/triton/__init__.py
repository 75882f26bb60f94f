"""Triton kernels of the operations, for NVIDIA GPUs and, in Triton's interpreter, for any machine."""

import os
from functools import cache
from importlib.util import find_spec

import torch


def missing_triton(device: torch.device) -> str:
    """Return why Triton's kernels cannot run on a device, in one line; empty if they can.

    On a GPU one kernel is run, once. On a CPU they run in the interpreter only, which Triton enables by
    TRITON_INTERPRET.
    """
    if find_spec("triton") is None:
        return "triton is not installed"
    if device.type == "cpu" and os.environ.get("TRITON_INTERPRET", "0") != "1":
        return "a CPU runs Triton's kernels only with TRITON_INTERPRET=1, to test them"
    if device.type not in ("cpu", "cuda"):
        return f"Triton's kernels do not run on {device.type}"
    return _tried(device) if device.type == "cuda" else ""


@cache
def _tried(device: torch.device) -> str:
    """Try a first kernel on a GPU, so that a server fails at startup and not after it has loaded its model."""
    major, minor = torch.cuda.get_device_capability(device)
    if major < 8:
        return f"Triton's kernels need a GPU of compute capability 8.0 or later, and this has {major}.{minor}"
    from tercet.kernels.triton.trial import fault

    return fault(device)
