"""What machine this is, and whether its accelerator still computes."""

import platform

import torch

_FAULTS = ("CUDA error", "Triton Error [CUDA]")
_SHORTAGES = ("out of memory", "ALLOC_FAILED")
"""Words of a RuntimeError: that an accelerator failed, and that it lacked memory alone, after which it goes on."""


def describe_machine() -> dict[str, str]:
    """What decides which kernels can run here, by name."""
    facts = {
        "torch": torch.__version__,
        "processor": f"{platform.machine()}, {torch.get_num_threads()} threads",
        "cpu features": torch.backends.cpu.get_cpu_capability(),
    }
    if not torch.cuda.is_available():
        return {**facts, "gpu": "none"}
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        memory = properties.total_memory / 2**30
        facts[f"gpu {index}"] = f"{properties.name}, sm{properties.major}{properties.minor}, {memory:.0f} GiB"
    return facts


def has_failed(error: BaseException) -> bool:
    """Whether an error left an accelerator so that what this process computes there from now on means nothing.

    The device is asked, too: who caught an error before may have raised one of another kind.
    """
    said = str(error)
    fault = isinstance(error, torch.AcceleratorError)
    fault |= isinstance(error, RuntimeError) and any(words in said for words in _FAULTS)
    if fault and not any(words in said for words in _SHORTAGES):
        return True
    try:
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            torch.cuda.synchronize()
    except RuntimeError:
        return True
    return False


def default_device() -> torch.device:
    """The first GPU, or the CPU where there is none."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
