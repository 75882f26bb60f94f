"""What machine this is."""

import platform

import torch


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


def default_device() -> torch.device:
    """The first GPU, or the CPU where there is none."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
