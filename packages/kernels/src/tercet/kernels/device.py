"""Description of this machine, and tests of its GPUs: usable by torch, present, failed."""

import os
import platform
import warnings
from pathlib import Path

import torch

from tercet.kernels.errors import BusyDeviceError

_TORCH_BUILDS = "https://pytorch.org/get-started/locally"
_DRIVER_FILES = (Path("/dev/nvidia0"), Path("/usr/lib/wsl/lib/libcuda.so.1"))
"""Paths that exist where a driver has found a GPU."""
_BUS = Path("/sys/bus/pci/devices")
_DISPLAYS = ("0x0300", "0x0302")
"""Prefixes of the PCI class of a GPU, with and without display connectors."""
_UNSUPPORTED = ("no kernel image", "unsupported toolchain", "kernel image is invalid")
"""Parts of error messages: torch has no kernels for this GPU or its driver."""
_STARTING = "system not yet initialized"
"""Part of an error message: the GPUs wait for Fabric Manager to connect them, for example after a boot."""
_FAULTS = ("CUDA error", "Triton Error [CUDA]")
_SHORTAGES = ("out of memory", "ALLOC_FAILED")
"""Parts of a RuntimeError's message: an accelerator failed (`_FAULTS`), or merely ran out of memory (`_SHORTAGES`)."""


def describe_machine() -> dict[str, str]:
    """Return the facts that decide which kernels can run here, by name."""
    facts = {
        "torch": torch.__version__,
        "processor": f"{platform.machine()}, {torch.get_num_threads()} threads",
        "cpu features": torch.backends.cpu.get_cpu_capability(),
    }
    if missing := missing_gpu():
        return {**facts, "gpu": f"none: {missing}"}
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        memory = properties.total_memory / 2**30
        name = f"{properties.name}, sm{properties.major}{properties.minor}, {memory:.0f} GiB"
        facts[f"gpu {index}"] = f"{name}{_free_memory(index)}"
    return facts


def _free_memory(index: int) -> str:
    """Return the free memory of a GPU for a description; empty if it cannot be asked now."""
    try:
        free, _ = torch.cuda.mem_get_info(index)
    except RuntimeError:
        return ""
    return f", {free / 2**30:.0f} GiB free"


def has_failed(error: BaseException) -> bool:
    """Return whether an error left an accelerator in a state in which its results cannot be trusted.

    The device is queried, too, because a handler may have turned the original error into one of another type.
    """
    message = str(error)
    fault = isinstance(error, torch.AcceleratorError)
    fault |= isinstance(error, RuntimeError) and any(words in message for words in _FAULTS)
    if fault and not any(words in message for words in _SHORTAGES):
        return True
    try:
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            torch.cuda.synchronize()
    except RuntimeError:
        return True
    return False


def default_device() -> torch.device:
    """Return the first GPU, or the CPU if torch can use no GPU.

    Raises BusyDeviceError.
    """
    return torch.device("cpu" if missing_gpu() else "cuda")


def missing_gpu(number: int = 0) -> str:
    """Return why torch can never compute on GPU `number`, in one line; empty if it can.

    A kernel is run to find out. The machine must have that many GPUs. Raises BusyDeviceError if the GPU is only
    temporarily unusable. Warnings of torch are suppressed.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if torch.version.hip is not None:
            return f"torch {torch.__version__} is for AMD's GPUs, for which nothing here was made"
        if not torch.cuda.is_available():
            return _missing_gpu_reason()
        try:
            _compute(torch.device("cuda", number))
        except (AssertionError, RuntimeError) as error:
            if not any(words in str(error) for words in _UNSUPPORTED):
                raise BusyDeviceError(f"GPU {number} cannot be used now: {_first_line(error)}") from error
            return _unsupported_gpu_reason(number)
    return ""


def sees_nvidia() -> bool:
    """Return whether the machine has an NVIDIA GPU, even one that torch, the driver or a container cannot reach."""
    if any(path.exists() for path in _DRIVER_FILES):
        return True
    for device in _BUS.glob("*"):
        try:
            vendor, kind = ((device / name).read_text(encoding="ascii") for name in ("vendor", "class"))
        except OSError:
            continue
        if vendor.strip() == "0x10de" and kind.startswith(_DISPLAYS):
            return True
    return False


def _compute(device: torch.device) -> None:
    """Run a kernel of torch on a device and wait for it; errors of torch pass through."""
    torch.ones(1, device=device).add_(1).item()


def _missing_gpu_reason() -> str:
    """Return why torch finds no GPU. Raises BusyDeviceError if it may find one later."""
    if torch.version.cuda is None:
        return f"torch {torch.__version__} was built without CUDA: one that has it is chosen at {_TORCH_BUILDS}"
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
    except (AssertionError, RuntimeError) as error:
        why = _first_line(error).rstrip(".")
        if _STARTING in why:
            raise BusyDeviceError(f"the GPUs cannot be used now: {why} (is Fabric Manager running?)") from error
    else:
        why = "torch finds none"
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        why += f" (CUDA_VISIBLE_DEVICES is {visible!r})"
    if "no NVIDIA driver" in why:
        why += "; a container gets it from its host, as by docker run --gpus all"
    return why


def _unsupported_gpu_reason(number: int) -> str:
    properties = torch.cuda.get_device_properties(number)
    built = ", ".join(torch.cuda.get_arch_list())
    return (
        f"torch {torch.__version__} has no kernels that GPU {number} ({properties.name}, sm{properties.major}"
        f"{properties.minor}) and its driver run, only {built}: others are chosen at {_TORCH_BUILDS}"
    )


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0]
