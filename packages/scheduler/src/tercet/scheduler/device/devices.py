"""Which device a process computes on, by the name that an operator gave: decided once, and said in the log."""

import logging
from functools import cache

import torch

from tercet.kernels.device import missing_gpu, sees_nvidia
from tercet.kernels.errors import BusyDeviceError
from tercet.scheduler.config import ConfigError, InsufficientMemoryError
from tercet.scheduler.model_files import SLOW_ON_CPU

logger = logging.getLogger(__name__)


@cache
def first_gpu(name: str) -> int | None:
    """The number behind a device's name, or 0; None where the model runs on a CPU.

    "auto" is a GPU that can be used, and the log says why it is none where there is one. Raises ConfigError for a GPU
    that is named and cannot be used, and
    InsufficientMemoryError for one that cannot be used now, with "auto", too: a scheduler
    that starts again must not end up on a CPU because another process is slow to leave.
    """
    kind, _, number = name.partition(":")
    if kind == "cpu":
        return None
    first = int(number or 0)
    if first and first >= (count := torch.cuda.device_count()) > 0:
        raise ConfigError(f"--device {name}: this machine's GPUs are {count}, the first of them number 0")
    try:
        missing = missing_gpu(first)
    except BusyDeviceError as error:
        raise InsufficientMemoryError(f"--device {name}: {error}") from error
    if not missing:
        return first
    if kind == "cuda":
        raise ConfigError(f"--device {name}: {missing}")
    logger.log(logging.WARNING if sees_nvidia() else logging.INFO, "no GPU is used: %s", missing)
    return None


def device_of(name: str) -> torch.device:
    """The device of a name. Raises ConfigError as `first_gpu` does."""
    number = first_gpu(name)
    if number is None:
        return torch.device("cpu")
    return torch.device("cuda", number) if ":" in name else torch.device("cuda")


def take_device(name: str) -> torch.device:
    """The device, which is the calling thread's from now on: kernels and streams are made for that one unasked."""
    device = device_of(name)
    if device.index is not None:
        torch.cuda.set_device(device)
    return device


def slow_dtype(device: torch.device) -> str:
    """The one of 16 bits for which a device has no arithmetic of its own; empty if it has that for both."""
    if device.type == "cpu":
        return SLOW_ON_CPU
    return "bfloat16" if torch.cuda.get_device_capability(device) < (8, 0) else ""
