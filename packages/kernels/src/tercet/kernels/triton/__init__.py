"""The operations as Triton kernels, one a file: for NVIDIA GPUs, and for any machine in Triton's interpreter."""

import os
from functools import cache
from importlib.util import find_spec

import torch


def missing_triton(device: torch.device) -> str:
    """Why Triton's kernels cannot run on a device, in one line; empty where they can. On a GPU one is tried once.

    On a CPU they run in the interpreter alone, which Triton takes from the variable TRITON_INTERPRET.
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
    """Of a GPU: it is found out by a first kernel, for otherwise a server would, once its model is loaded."""
    major, minor = torch.cuda.get_device_capability(device)
    if major < 8:
        return f"Triton's kernels need a GPU of compute capability 8.0 or later, and this has {major}.{minor}"
    from tercet.kernels.triton.trial import fault

    return fault(device)
