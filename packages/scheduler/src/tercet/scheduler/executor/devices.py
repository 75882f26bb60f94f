"""Which device a process computes on, by the name that an operator gave."""

import torch


def first_gpu(name: str) -> int | None:
    """The number behind a device's name, or 0; None where the model runs on a CPU.

    "auto" is a GPU where there is one. Raises ValueError for a GPU that this machine has not.
    """
    kind, _, number = name.partition(":")
    if kind == "cpu" or (kind == "auto" and not torch.cuda.is_available()):
        return None
    if not torch.cuda.is_available():
        raise ValueError(f"--device {name}: this machine has no GPU that torch can use")
    first, count = int(number or 0), torch.cuda.device_count()
    if number and first >= count:
        raise ValueError(f"--device {name}: this machine's GPUs are {count}, the first of them number 0")
    return first


def take_device(name: str) -> torch.device:
    """The device, which is the calling thread's from now on: kernels and streams are made for that one unasked."""
    number = first_gpu(name)
    if number is None:
        return torch.device("cpu")
    if ":" not in name:
        return torch.device("cuda")
    device = torch.device("cuda", number)
    torch.cuda.set_device(device)
    return device
