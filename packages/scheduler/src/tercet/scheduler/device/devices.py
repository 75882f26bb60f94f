"""The choice of the device by the operator's option, made once and logged."""

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
    """Return the GPU number in a device's name, default 0; None if the model runs on a CPU.

    "auto" is a usable GPU, and the log says why one that exists is not used. Raise ConfigError for a named GPU that
    cannot be used, and InsufficientMemoryError for one that cannot be used now, even with "auto": a restarted scheduler
    must not fall back to a CPU because another process is slow to exit.
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
    """Return the device of a name. Raise ConfigError as `first_gpu` does."""
    number = first_gpu(name)
    if number is None:
        return torch.device("cpu")
    return torch.device("cuda", number) if ":" in name else torch.device("cuda")


def select_device(name: str) -> torch.device:
    """Return the device and make it the calling thread's default, which kernels and streams use implicitly."""
    device = device_of(name)
    if device.index is not None:
        torch.cuda.set_device(device)
    return device


def slow_dtype(device: torch.device) -> str:
    """Return the 16-bit dtype for which a device has no native arithmetic; empty if it has both."""
    if device.type == "cpu":
        return SLOW_ON_CPU
    return "bfloat16" if torch.cuda.get_device_capability(device) < (8, 0) else ""
