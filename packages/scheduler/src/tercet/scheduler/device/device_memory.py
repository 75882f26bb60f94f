"""Total and available memory of a device."""

import os
from pathlib import Path

import torch

_CGROUP = Path("/sys/fs/cgroup")
_LIMITS_AND_USES = (
    ("memory.max", "memory.current"),
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
)
"""Files of cgroups v2 and v1."""
_UNLIMITED = 1 << 62


def available_bytes(device: torch.device) -> int:
    """Return the bytes that can be allocated now: of the accelerator, or of this machine within this process's cgroup.

    For an integrated GPU the machine's number is more accurate: CUDA counts the page cache as used.
    """
    if device.type == "cuda" and not shares_host_memory(device):
        free: int = torch.cuda.mem_get_info(device)[0]
        return free
    return min(_machine("MemAvailable:"), _cgroup()[1])


def total_bytes(device: torch.device) -> int:
    """Return the upper limit in bytes: of the accelerator, or of this machine within this process's cgroup."""
    if device.type == "cuda":
        total: int = torch.cuda.mem_get_info(device)[1]
        return total
    return min(_machine("MemTotal:"), _cgroup()[0])


def shares_host_memory(device: torch.device) -> bool:
    """Return whether a device allocates from host memory."""
    return device.type == "cpu" or bool(torch.cuda.get_device_properties(device).is_integrated)


def _machine(name: str) -> int:
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:  # not Linux
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    kibibytes = next(line.split()[1] for line in lines if line.startswith(name))
    return int(kibibytes) * 1024


def _cgroup() -> tuple[int, int]:
    """Return a container's limit and the available part of it, counting page cache as free; without a limit, no
    bounds.
    """
    for limit_name, used_name in _LIMITS_AND_USES:
        try:
            limit = (_CGROUP / limit_name).read_text(encoding="ascii").strip()
            if limit == "max":
                return _UNLIMITED, _UNLIMITED
            used_path = _CGROUP / used_name
            stat = dict(
                line.split() for line in (used_path.parent / "memory.stat").read_text(encoding="ascii").splitlines()
            )
            files = sum(int(stat.get(name, 0)) for name in ("inactive_file", "active_file"))
            return int(limit), max(0, int(limit) - int(used_path.read_text(encoding="ascii")) + files)
        except OSError:
            continue
    return _UNLIMITED, _UNLIMITED
