"""The operations as Triton kernels, one a file: for NVIDIA GPUs, and for any machine in Triton's interpreter."""

import os
from importlib.util import find_spec

import torch


def missing_triton(device: torch.device) -> str:
    """Why Triton's kernels cannot run on a device; empty where they can.

    On a CPU they run in the interpreter alone, which Triton takes from the variable TRITON_INTERPRET.
    """
    if find_spec("triton") is None:
        return "triton is not installed"
    if device.type == "cpu" and os.environ.get("TRITON_INTERPRET", "0") != "1":
        return "a CPU runs Triton's kernels only with TRITON_INTERPRET=1, to test them"
    if device.type not in ("cpu", "cuda"):
        return f"Triton's kernels do not run on {device.type}"
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 0):
        return "Triton's kernels need a GPU of compute capability 8.0 or later"
    return ""
